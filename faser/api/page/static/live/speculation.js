// Panels of speculation: the flow of draft tokens, how long drafts are, and the steps that verify them.

import { fillLegend, legend, RECENT_S, SPAN_S } from "./board.js";
import { BarChart, FlowChart, HeatChart, StepChart } from "./charts.js";
import * as n from "./numbers.js";

const DRAFTERS = ["draft_model", "eagle3", "mtp", "dflash", "dspark", "suffix", "ngram", "ngram_model", "grammar"];

// Folded: speculation is one part of the server, and these panels are half of the view.
export function addSpeculation(board) {
  board.fold("Speculation", addPanels);
}

function addPanels(board) {
  const flow = new FlowChart({});
  const drafterKey = legend([]);
  board.panel({
    title: "Draft token flow",
    hint: `last ${RECENT_S} s`,
    className: "wide",
    charts: [flow],
    key: drafterKey,
    draw: ({ recent }) => {
      const found = n.drafters(recent);
      const names = [...DRAFTERS, ...Object.keys(found)].filter(
        (name, place, all) => found[name] && all.indexOf(name) === place,
      );
      const all = { drafted: 0, pruned: 0, verified: 0, accepted: 0 };
      for (const name of names) for (const kind of Object.keys(all)) all[kind] += found[name][kind];
      const wasted = all.verified - all.accepted;
      const of = (part) => n.percent(n.share(part, all.verified));
      flow.draw(
        names.map((name) => ({ class: `by-${name.replaceAll("_", "-")}`, ...found[name] })),
        {
          none: `no drafts in the last ${RECENT_S} s`,
          drafted: `drafted ${n.count(all.drafted)}`,
          verified: `verified ${n.count(all.verified)}`,
          pruned: `pruned ${n.count(all.pruned)}`,
          accepted: `accepted ${n.count(all.accepted)} · ${of(all.accepted)}`,
          wasted: `wasted ${n.count(wasted)} · ${of(wasted)}`,
        },
      );
      fillLegend(
        drafterKey,
        names.map((name) => [
          `by-${name.replaceAll("_", "-")}`,
          `${name.replaceAll("_", " ")} ${n.percent(n.share(found[name].drafted, all.drafted))}`,
        ]),
      );
      return {
        words: names.length
          ? `${n.count(all.drafted)} drafted, ${n.count(all.verified)} verified, ${n.count(all.accepted)} accepted`
          : "no drafts",
        columns: ["drafter", "drafted", "pruned", "verified", "accepted", "predicted", "wasted"],
        rows: names.map((name) => {
          const own = found[name];
          return [
            name,
            n.count(own.drafted),
            n.count(own.pruned),
            n.count(own.verified),
            n.count(own.accepted),
            n.count(own.expected),
            n.count(own.verified - own.accepted),
          ];
        }),
      };
    },
  });

  const heat = new HeatChart({ span: SPAN_S });
  board.pointer(heat, heat.left, heat.side);
  board.panel({
    title: "γ, draft tokens verified per step",
    hint: "share by second",
    charts: [heat],
    draw: ({ recent }) => {
      const counts = n.gammas(recent);
      const rows = Math.max(5, ...board.samples.map((each) => each.speculation?.gammas?.length ?? 0));
      heat.draw(
        board
          .points((each) => each.speculation?.gammas ?? [])
          .map(({ ago, dt, values }) => ({
            ago,
            dt,
            counts: values,
          })),
        rows,
        counts,
        `${RECENT_S} s`,
        board.at,
      );
      const all = n.sum(counts);
      return {
        words: all ? `mean ${n.fraction(n.mean(counts))} in the last ${RECENT_S} s` : "no steps",
        columns: ["γ", "sequences × steps", "share"],
        rows: counts.map((count, gamma) => [gamma, n.count(count), n.percent(n.share(count, all))]),
      };
    },
  });

  const steps = new StepChart({});
  board.panel({
    title: "Steps",
    hint: "latest, in order",
    className: "full",
    charts: [steps],
    key: legend([
      ["step-draft", "draft"],
      ["step-plain", "verify (no drafts)"],
      ["step-serial", "verify (serial)"],
      ["step-overlapped", "verify (overlapped)"],
      ["step-rest", "host"],
    ]),
    draw: ({ upTo }) => {
      const found = [...upTo].reverse().find((each) => each.timeline.length)?.timeline ?? [];
      const made = n.steps(found);
      steps.draw(made, "no step yet");
      const mean = (value) => (made.length ? n.durationText(n.total(made, value) / made.length) : n.NONE);
      return {
        words: made.length
          ? `${made.length} steps of ${mean((each) => each.length)}, ${mean((each) => each.draft)} of it drafting`
          : "none yet",
        columns: ["step", "length", "drafting", "verifying", "sequences", "tokens", "mode"],
        rows: made
          .slice(-12)
          .reverse()
          .map((each, place) => [
            place ? `−${place}` : "last",
            n.durationText(each.length),
            n.durationText(each.draft),
            n.durationText(each.verify),
            n.count(each.sequences),
            n.count(each.rows),
            each.mode,
          ]),
      };
    },
  });

  const depth = new BarChart({ left: 22, right: 96 });
  board.panel({
    title: "Accepted by depth",
    hint: `last ${RECENT_S} s`,
    charts: [depth],
    draw: ({ recent }) => {
      const found = n.depths(recent).filter(({ tried }) => tried > 0);
      const shown = found.slice(0, 8);
      depth.without(shown.length ? "" : `no drafts in the last ${RECENT_S} s`);
      depth.draw(
        shown.map(({ tried, accepted }, place) => ({
          name: String(place + 1),
          words: `${n.percent(accepted / tried)} of ${n.count(tried)}`,
          parts: [[accepted / tried, "good"]],
        })),
      );
      return {
        words:
          found
            .map(({ tried, accepted }, place) => `depth ${place + 1} ${n.percent(accepted / tried)}`)
            .join(", ") || "no drafts",
        columns: ["depth", "drafted so far", "accepted", "share"],
        rows: found.map(({ tried, accepted }, place) => [
          place + 1,
          n.count(tried),
          n.count(accepted),
          n.percent(accepted / tried),
        ]),
      };
    },
  });

  board.tile({
    title: "Step time",
    options: { format: n.durationText },
    series: [
      { kind: "area", class: "own" },
      { kind: "line", class: "predicted" },
    ],
    key: [
      ["own", "measured"],
      ["predicted", "predicted"],
    ],
    number: ({ now, recent }) => {
      const ms = n.share(
        n.total(now, (each) => each.speculation?.measured_ms),
        n.total(now, (each) => each.steps),
      );
      const error = n.share(
        n.total(recent, (each) => each.speculation?.predicted_ms),
        n.total(recent, (each) => each.speculation?.measured_ms),
      );
      const [value, unit] = n.duration(ms);
      return [
        value,
        unit,
        error === null ? "no steps" : `predicted ${error >= 1 ? "+" : "−"}${n.percent(Math.abs(error - 1))}`,
      ];
    },
    values: (each) =>
      each.steps && each.speculation
        ? [(each.speculation.measured_ms ?? 0) / each.steps, (each.speculation.predicted_ms ?? 0) / each.steps]
        : [null, null],
    columns: ["measured", "predicted", "steps"],
    rows: ({ now }) => {
      const steps = n.total(now, (each) => each.steps);
      return [
        ...["measured_ms", "predicted_ms"].map((name) =>
          n.durationText(
            n.share(
              n.total(now, (each) => each.speculation?.[name]),
              steps,
            ),
          ),
        ),
        n.count(steps),
      ];
    },
  });

  board.tile({
    title: "Mode",
    options: { format: n.percent, most: 1, least: 1 },
    series: ["plain", "serial", "overlapped"].map((mode) => ({
      kind: "area",
      class: `mode-${mode}`,
      stacked: true,
    })),
    key: [
      ["mode-plain", "no drafts"],
      ["mode-serial", "serial drafting"],
      ["mode-overlapped", "overlapped drafting"],
    ],
    number: ({ last, recent }) => {
      const spec = last?.speculation;
      const why = Object.entries(n.merged(recent, (each) => each.speculation?.bypasses)).sort(
        ([, one], [, other]) => other - one,
      )[0];
      return [
        spec?.mode ?? n.NONE,
        spec ? `· policy ${spec.policy}` : "",
        paidAt(last) ?? (why ? `no drafts because: ${why[0]}` : ""),
        savedSoFar(last),
      ];
    },
    values: (each) => {
      const modes = modeShares([each]);
      return modes ? ["plain", "serial", "overlapped"].map((mode) => modes[mode]) : [null, null, null];
    },
    columns: ["plain", "serial", "overlapped"],
    rows: ({ now }) => ["plain", "serial", "overlapped"].map((mode) => n.percent(modeShares(now)?.[mode] ?? null)),
  });
}

/** What drafts were measured to bring at the present load; null: not known. */
function paidAt(sample) {
  const found = sample?.speculation?.paid?.find(([least, most]) => least <= sample.running && sample.running <= most);
  if (!found) return null;
  const [, , ratio, low, high, drafts] = found;
  const so = { true: "on", false: "off" }[drafts] ?? "measuring";
  return `speedup from drafts ${ratio.toFixed(2)}× (${low.toFixed(2)} … ${high.toFixed(2)}): ${so}`;
}

/** What drafts have saved since the server started, and the bound on what they can have cost. */
function savedSoFar(sample) {
  if (!sample?.speculation?.saved) return "";
  const [saved, most] = sample.speculation.saved;
  const since = saved < 0 ? `cost ${(-saved).toFixed(1)} s` : `saved ${saved.toFixed(1)} s`;
  return `· ${since} so far; cannot have cost more than ${most.toFixed(1)} s`;
}

function modeShares(samples) {
  const modes = n.merged(samples, (each) => each.speculation?.modes);
  const all = n.sum(Object.values(modes));
  if (!all) return null;
  const found = { plain: 0, serial: 0, overlapped: 0 };
  for (const [mode, steps] of Object.entries(modes)) found[n.MODES[mode] ?? "overlapped"] += steps / all;
  return found;
}
