// The arithmetic of the live view: sums over samples and numbers in words. Knows no element.

export const MODES = {
  plain: "plain",
  serial: "serial",
  streams: "overlapped",
  sm: "overlapped",
  cores: "overlapped",
};

// What became of a sample that leaves out its zeros.
export function filled(sample) {
  return {
    t: sample.t,
    dt: sample.dt,
    state: sample.state,
    timeline: sample.timeline ?? [],
    kv: sample.kv ?? 0,
    running: sample.running ?? 0,
    waiting: sample.waiting ?? 0,
    prompt: sample.prompt ?? 0,
    cached: sample.cached ?? 0,
    output: sample.output ?? 0,
    queries: sample.queries ?? 0,
    hits: sample.hits ?? 0,
    steps: sample.steps ?? 0,
    preemptions: sample.preemptions ?? 0,
    rejected: sample.rejected ?? 0,
    finished: sample.finished ?? {},
    latencies: sample.latencies ?? {},
    slo: sample.slo ?? {},
    admission: sample.admission ?? {},
    outlook: sample.outlook ?? null,
    speculation: sample.speculation ?? null,
  };
}

export function total(samples, value) {
  let sum = 0;
  for (const each of samples) sum += value(each) ?? 0;
  return sum;
}

// Per second.
export function rate(samples, value) {
  const seconds = total(samples, (each) => each.dt);
  return seconds > 0 ? total(samples, value) / seconds : 0;
}

// null: there is nothing to divide by.
export function share(part, whole) {
  return whole > 0 ? part / whole : null;
}

export function accepted(sample) {
  return drafted(sample, "accepted");
}

// Draft tokens of one kind (drafted, pruned, verified, accepted) of all drafters.
export function drafted(sample, kind) {
  return total(Object.values(sample.speculation?.drafters ?? {}), (each) => each[kind]);
}

export function sum(counts) {
  return counts.reduce((one, other) => one + other, 0);
}

// Of the places of an array, each as often as its count says; null: there are none.
export function mean(counts) {
  return share(sum(counts.map((count, place) => count * place)), sum(counts));
}

// Element by element, of arrays of any lengths.
export function summed(samples, value) {
  const found = [];
  for (const each of samples) {
    (value(each) ?? []).forEach((count, place) => {
      found[place] = (found[place] ?? 0) + count;
    });
  }
  return found;
}

// Key by key.
export function merged(samples, value) {
  const found = {};
  for (const each of samples) {
    for (const [name, count] of Object.entries(value(each) ?? {})) found[name] = (found[name] ?? 0) + count;
  }
  return found;
}

export function gammas(samples) {
  return summed(samples, (each) => each.speculation?.gammas);
}

// Tokens that a sequence gets in a step; null: no step.
export function tokensPerStep(samples) {
  const steps = sum(gammas(samples));
  return steps > 0 ? 1 + total(samples, accepted) / steps : null;
}

// [{tried, accepted}] for depth 1, 2, …: drafts at least so long, and those whose token there was right.
export function depths(samples) {
  const counts = gammas(samples);
  const right = summed(samples, (each) => each.speculation?.accepted_at);
  return counts.slice(1).map((_, place) => ({ tried: sum(counts.slice(place + 1)), accepted: right[place] ?? 0 }));
}

// {name: {drafted, pruned, verified, accepted, expected}}
export function drafters(samples) {
  const found = {};
  for (const each of samples) {
    for (const [name, counts] of Object.entries(each.speculation?.drafters ?? {})) {
      const own = (found[name] ??= { drafted: 0, pruned: 0, verified: 0, accepted: 0, expected: 0 });
      for (const kind of Object.keys(own)) own[kind] += counts[kind] ?? 0;
    }
  }
  return found;
}

// [{end, length, draft, verify, sequences, rows, mode}] in milliseconds. A step is received some time after
// its end, so one that seems to end after the next one begins ended then.
export function steps(timeline) {
  let next = Infinity;
  return timeline
    .toReversed()
    .map(([received, length, draft, verify, sequences, rows, mode]) => {
      const end = Math.min(received, next);
      next = end - length;
      return { end, length, draft, verify, sequences, rows, mode: MODES[mode] ?? "overlapped" };
    })
    .reverse();
}

// {class: {target: [met, missed]}}
export function attainment(samples) {
  const found = {};
  for (const each of samples) {
    for (const [name, targets] of Object.entries(each.slo)) {
      for (const [target, [met, missed]] of Object.entries(targets)) {
        const own = ((found[name] ??= {})[target] ??= [0, 0]);
        own[0] += met;
        own[1] += missed;
      }
    }
  }
  return found;
}

// {class: {what became of its requests on arrival: how many}}
export function admissions(samples) {
  const found = {};
  for (const each of samples) {
    for (const [name, counts] of Object.entries(each.admission)) {
      const own = (found[name] ??= {});
      for (const [what, count] of Object.entries(counts)) own[what] = (own[what] ?? 0) + count;
    }
  }
  return found;
}

// Requests a second with a sign; null becomes a dash.
export function signedRate(value) {
  return value === null || value === undefined ? NONE : `${value < 0 ? "−" : "+"}${Math.abs(value).toFixed(2)} / s`;
}

// Numbers in words. null becomes a dash.

const WHOLE = new Intl.NumberFormat("en");
export const NONE = "–";

export function count(value) {
  if (value === null || value === undefined) return NONE;
  if (value >= 9.995e6) return `${(value / 1e6).toFixed(1)} M`;
  return value >= 99950 ? `${(value / 1e3).toFixed(0)} k` : WHOLE.format(Math.round(value));
}

export function fraction(value, digits = 2) {
  return value === null || value === undefined ? NONE : value.toFixed(digits);
}

export function percent(value) {
  if (value === null || value === undefined) return NONE;
  const hundredths = 100 * value;
  return `${hundredths > 0 && hundredths < 9.95 ? hundredths.toFixed(1) : hundredths.toFixed(0)} %`;
}

// [number, unit]
export function duration(ms) {
  if (ms === null || ms === undefined) return [NONE, ""];
  if (ms >= 9995) return [(ms / 1e3).toFixed(1), "s"];
  if (ms >= 999.5) return [(ms / 1e3).toFixed(2), "s"];
  if (ms >= 99.95) return [ms.toFixed(0), "ms"];
  return [ms.toFixed(ms >= 9.995 ? 1 : 2), "ms"];
}

export function durationText(ms) {
  return duration(ms).join(" ").trim();
}

export function size(value) {
  if (value >= 1e9) return `${(value / 1e9).toFixed(value >= 1e10 ? 0 : 1)} B`;
  return value >= 1e6 ? `${(value / 1e6).toFixed(0)} M` : WHOLE.format(value);
}

export function uptime(seconds) {
  const minutes = Math.floor(seconds / 60);
  if (minutes < 1) return `${Math.floor(seconds)} s`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 2880) return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  return `${Math.floor(minutes / 1440)} days`;
}
