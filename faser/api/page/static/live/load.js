// Panels of what the server is asked to do: tokens, requests, latencies, KV cache.

import { legend, RECENT_S } from "./board.js";
import * as n from "./numbers.js";

const PERCENTILES = ["p50", "p95", "p99"];

export function addLoad(board) {
  const perSecond = (value) => `${n.count(value)}/s`;
  board.tile({
    title: "Output",
    options: { format: perSecond },
    series: [
      { kind: "area", class: "own", stacked: true },
      { kind: "area", class: "gained", stacked: true },
    ],
    key: [
      ["own", "the model's own tokens"],
      ["gained", "accepted drafts"],
    ],
    number: ({ now }) => [
      n.count(n.rate(now, (each) => each.output)),
      "tokens/s",
      `${n.count(n.rate(now, (each) => each.prompt - each.cached))} prompt tokens/s`,
    ],
    values: (each) => [
      Math.max(0, each.output - n.accepted(each)) / each.dt,
      Math.min(each.output, n.accepted(each)) / each.dt,
    ],
    columns: ["output tokens/s", "of them accepted drafts", "prompt tokens/s"],
    rows: ({ now }) => [
      n.count(n.rate(now, (each) => each.output)),
      n.count(n.rate(now, n.accepted)),
      n.count(n.rate(now, (each) => each.prompt - each.cached)),
    ],
  });
  board.tile({
    title: "Requests",
    options: { format: n.count, least: 4 },
    series: [
      { kind: "area", class: "own", stacked: true },
      { kind: "area", class: "waits", stacked: true },
    ],
    key: [
      ["own", "running"],
      ["waits", "waiting"],
    ],
    number: ({ last }) => [n.count(last?.running), "running", `${n.count(last?.waiting)} waiting`],
    values: (each) => [each.running, each.waiting],
    columns: ["running", "waiting"],
    rows: ({ last }) => [n.count(last?.running), n.count(last?.waiting)],
  });
  board.tile({
    title: "Tokens per sequence and step",
    options: { format: (value) => n.fraction(value, 1), least: 2 },
    series: [
      { kind: "area", class: "gained" },
      { kind: "line", class: "even" },
    ],
    key: [
      ["gained", "with drafts"],
      ["even", "without, 1"],
    ],
    number: ({ now, recent }) => [
      n.fraction(n.tokensPerStep(now)),
      "tokens",
      `${n.percent(
        n.share(
          n.total(recent, n.accepted),
          n.total(recent, (each) => n.drafted(each, "verified")),
        ),
      )} of drafts accepted`,
    ],
    values: (each) => {
      const tokens = n.tokensPerStep([each]);
      return [tokens, tokens && 1];
    },
    columns: ["tokens per step", "drafts accepted"],
    rows: ({ now }) => [
      n.fraction(n.tokensPerStep(now)),
      n.percent(
        n.share(
          n.total(now, n.accepted),
          n.total(now, (each) => n.drafted(each, "verified")),
        ),
      ),
    ],
  });
  latency(board, "Time to first token", "ttft", "requests");
  latency(board, "Time per output token", "tpot", "requests");
  board.tile({
    title: "KV cache",
    options: { format: n.percent, least: 0.05 },
    series: [{ kind: "area", class: "own" }],
    key: [["own", "blocks in use"]],
    number: ({ last, recent }) => {
      const hits = n.share(
        n.total(recent, (each) => each.hits),
        n.total(recent, (each) => each.queries),
      );
      return [n.percent(last?.kv ?? null), "in use", `${hits === null ? "no" : n.percent(hits)} prefix hits`];
    },
    values: (each) => [each.kv],
    columns: ["in use", "prefix hits", "preemptions"],
    rows: ({ last, now }) => [
      n.percent(last?.kv ?? null),
      n.percent(
        n.share(
          n.total(now, (each) => each.hits),
          n.total(now, (each) => each.queries),
        ),
      ),
      n.count(n.total(now, (each) => each.preemptions)),
    ],
  });
}

function latency(board, title, kind, what) {
  const of = (sample) => sample?.latencies[kind] ?? [0, null, null, null];
  board.tile({
    title,
    options: { format: n.durationText },
    series: [
      { kind: "line", class: "p99" },
      { kind: "line", class: "p95" },
      { kind: "line", class: "p50" },
    ],
    key: [
      ["p50", "p50"],
      ["p95", "p95"],
      ["p99", "p99"],
    ],
    number: ({ last }) => {
      const [, p50, p95, p99] = of(last);
      const [value, unit] = n.duration(p50);
      return [
        value,
        unit ? `${unit} p50` : "",
        p50 === null ? `no ${what} in the last ${RECENT_S} s` : `p95 ${n.durationText(p95)} · p99 ${n.durationText(p99)}`,
      ];
    },
    values: (each) => of(each).slice(1).reverse(),
    columns: [...PERCENTILES, `${what} in ${RECENT_S} s`],
    rows: ({ last }) => [...of(last).slice(1).map(n.durationText), n.count(of(last)[0])],
  });
}
