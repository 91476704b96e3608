// Panels of finished requests: latency targets, percentiles, finish reasons.

import { h } from "../dom.js";
import { fillTable, RECENT_S } from "./board.js";
import { BarChart } from "./charts.js";
import * as n from "./numbers.js";

const PERCENTILES = ["p50", "p95", "p99"];

export function addRequests(board) {
  const slo = new BarChart({ left: 128, right: 96 });
  const none = h("p", { class: "empty" }, "No finished request had a latency target (speculative.slo).");
  board
    .panel({
      title: "Latency targets met",
      hint: "last 2 min, by class",
      charts: [slo],
      draw: ({ upTo }) => {
        const found = Object.entries(n.attainment(upTo)).flatMap(([name, targets]) =>
          Object.entries(targets).map(([target, [met, missed]]) => [name, target, met, missed]),
        );
        none.hidden = found.length > 0;
        slo.svg.toggleAttribute("hidden", !found.length);
        slo.draw(
          found.map(([name, target, met, missed]) => ({
            name: `${name} ${target}`,
            words: `${n.percent(met / (met + missed))} of ${n.count(met + missed)}`,
            parts: [
              [met / (met + missed), "good"],
              [missed / (met + missed), "missed"],
            ],
          })),
        );
        return {
          words:
            found
              .map(([name, target, met, missed]) => `${name} ${target} ${n.percent(met / (met + missed))}`)
              .join(", ") || "no targets",
          columns: ["class", "target", "met", "missed"],
          rows: found.map(([name, target, ...counts]) => [name, target, ...counts.map(n.count)]),
        };
      },
    })
    .append(none);

  addAdmission(board);
  addOutlook(board);

  const table = h("table", { class: "shown" });
  board
    .panel({
      title: "Latency",
      hint: `last ${RECENT_S} s, ±2 %`,
      className: "half",
      draw: ({ last }) => {
        const columns = ["", ...PERCENTILES, "count"];
        const rows = [
          ["time to first token", "ttft"],
          ["time per output token", "tpot"],
          ["inter-token latency", "itl"],
        ].map(([name, kind]) => {
          const [count, ...values] = last?.latencies[kind] ?? [0, null, null, null];
          return [name, ...values.map(n.durationText), n.count(count)];
        });
        fillTable(table, "Latency", columns, rows);
        return { words: "", columns, rows };
      },
    })
    .append(table);

  const ended = h("table", { class: "shown" });
  board
    .panel({
      title: "Finished requests",
      hint: "last 2 min",
      className: "half",
      draw: ({ upTo }) => {
        const counts = n.merged(upTo, (each) => each.finished);
        const rows = [
          ["stop", counts.stop],
          ["length", counts.length],
          ["aborted", counts.abort],
          ["failed", counts.error],
          ["rejected", n.total(upTo, (each) => each.rejected)],
        ].map(([name, count]) => [name, n.count(count ?? 0)]);
        fillTable(ended, "Finished requests", ["", "requests"], rows);
        return { words: "", columns: ["", "requests"], rows };
      },
    })
    .append(ended);
  for (const shown of board.grid.querySelectorAll(".half .as-table")) shown.remove();
}

// Who was let in as asked, who waits, runs as another class or was refused, and for which target.
function addAdmission(board) {
  const table = h("table", { class: "shown" });
  const none = h("p", { class: "empty" }, "No request with a latency target arrived.");
  board
    .panel({
      title: "Admission by target",
      hint: "last 2 min, by class",
      className: "half",
      draw: ({ upTo }) => {
        const columns = ["class", "decision", "requests"];
        const rows = Object.entries(n.admissions(upTo)).flatMap(([name, counts]) =>
          Object.entries(counts).map(([what, count]) => [name, what, n.count(count)]),
        );
        none.hidden = rows.length > 0;
        table.hidden = !rows.length;
        fillTable(table, "Admission by target", columns, rows);
        return { words: "", columns, rows };
      },
    })
    .append(table, none);
}

// What the latency model expects beside what was measured, and how much more may come.
function addOutlook(board) {
  const table = h("table", { class: "shown" });
  const note = h("p", { class: "empty" });
  board
    .panel({
      title: "Predicted and measured",
      hint: "predicted means, measured medians",
      className: "half",
      draw: ({ last }) => {
        const columns = ["", "predicted", "measured"];
        const outlook = last?.outlook ?? null;
        const rows = [
          ["time to first token", "ttft"],
          ["time per output token", "tpot"],
        ].map(([name, kind]) => {
          const measured = last?.latencies[kind]?.[1] ?? null;
          return [name, n.durationText(outlook?.known ? (outlook[kind] ?? 0) : null), n.durationText(measured)];
        });
        if (outlook) {
          rows.push(["requests", `${n.fraction(outlook.rate)} / s`, `of ${n.fraction(outlook.capacity)} / s`]);
          for (const [name, [nine, ninetyNine]] of Object.entries(outlook.headroom ?? {})) {
            rows.push([`${name}: headroom at 90 %, 99 %`, n.signedRate(nine), n.signedRate(ninetyNine)]);
          }
        }
        note.textContent = outlook
          ? outlook.known
            ? ""
            : "No estimate: the server is overloaded."
          : "No estimate yet: too few requests have finished.";
        note.hidden = !note.textContent;
        fillTable(table, "Predicted and measured", columns, rows);
        return { words: "", columns, rows };
      },
    })
    .append(table, note);
}
