"""Cost of a step's control plane and messages to the host, by part, in two checkouts.

    python -m benchmarks speed.host_parts BASE_CHECKOUT OUT.json --questions FILE [--sequences 1,4,16]

FILE: of Spec-Bench. Everything of an engine with default flags but the model runs: scheduler, control of
speculation, policy, look-ups, statistics that leave ten times a second, messages to the front-end. In place of the
model the target "samples" what follows in the questions' own text, so drafts are right as often as text repeats
itself. Steps without drafts are those of an engine whose guard has found that drafts do not pay.

    control     deciding, looking up, choosing, cutting, laying out, committing, learning; with the engine's loop
    messages    statistics and the frame of the deltas
    sum         both: what the bars are for

The checkouts take turns: benchmarks/speed/checkouts. Milliseconds of the thread's processor time a step, medians.
"""

from pathlib import Path

from benchmarks.runner import about, git_commit, numbers, write_json
from benchmarks.speed.checkouts import compare, options_of

BARS_US = {"drafts": (60, 60, 75, 130, 280), "no drafts": (45, 50, 65, 110, 240)}  # at 1, 4, 16, 64, 256
SEQUENCES = (1, 4, 16, 64, 256)
RUN = '''
import gc, json, time
from faser.config.engine import EngineConfig
from faser.config.environment import cache_dir
from faser.engine.build import build
from faser.engine.checkpoints.source import resolve
from faser.engine.contract.messages import Deltas, frame
from faser.engine.contract.plan import StepResult
from faser.engine.execution.drafting.drafter import drafts_of
from faser.engine.text.tokenizer import load_tokenizer
from faser.engine.worker import StatsReport
from faser.types.request import Request
from faser.types.sampling import SamplingParams

questions, *counts = ARGUMENTS
directory = resolve(None, cache_dir(), progress=lambda *_: None)
tokenizer = load_tokenizer(directory)
turns = [json.loads(line)["turns"][0] for line in open(questions, encoding="utf-8")]
text = [token for turn in turns for token in tokenizer.encode(turn)]
PROMPT, STRIDE = 64, 97

class Target:
    """Samples what follows in the text; drafts by the engine's own drafter."""

    def __init__(self, drafter, costs):
        self.drafter, self.costs, self.begins, self.run_s = drafter, costs, {}, 0.0

    def draft(self, plan, during=None):
        self._release(plan.released)
        return drafts_of(plan, self.drafter.propose(plan), 0.0, 2e-5)

    def run(self, plan):
        began_s = time.thread_time()
        self._release(plan.released)
        for start in plan.started:
            self.begins[start.slot] = STRIDE * start.seed
            self.drafter.start(start)
        rows, at, counts, tokens = plan.rows, 0, [], []
        for slot, begin, count, drafts, samples in zip(
            rows.slots, rows.starts, rows.counts, rows.num_drafts, rows.samples
        ):
            place = self.begins[slot] + begin + count - drafts
            at += count
            taken = 0
            while taken < drafts and rows.token_ids[at - drafts + taken] == text[(place + taken) % len(text)]:
                taken += 1
            counts.append(taken + 1 if samples else 0)
            tokens += [text[(place + i) % len(text)] for i in range(counts[-1])]
        told = [slot for slot, count in zip(rows.slots, counts) if count]
        self.drafter.commit(told, [count for count in counts if count], tokens)
        run_s = self.costs.step_s(plan.num_rows, plan.kv_tokens)
        result = StepResult(step=plan.step, counts=counts, token_ids=tokens, run_s=run_s)
        self.run_s += time.thread_time() - began_s
        return result

    def _release(self, slots):
        for slot in slots:
            self.drafter.release(slot)

class Never:
    """A guard that has found that drafts do not pay."""

    def allows(self, *_, **__): return False
    def launched(self, _): pass
    def observe(self, *_): pass
    def paid(self): return ()
    def balance(self): return None

drafters = []
def keep(drafter):
    drafters.append(drafter)
    return drafter

for count in map(int, counts):
    config = EngineConfig(max_num_seqs=count, max_num_batched_tokens=max(2048, 20 * count))
    built = build(config, directory, lambda *_: None, wrap_drafter=keep)
    gc.collect()
    gc.freeze()  # as the engine's process does
    engine, report = built.engine, StatsReport(built.engine)
    target = engine._executor = Target(drafters[-1], built.costs)
    scheduler = engine._scheduler
    control = scheduler._speculation
    spent_s = {"messages": 0.0}
    for i in range(count):
        prompt = tuple(text[STRIDE * i : STRIDE * i + PROMPT])
        sampling = SamplingParams(temperature=0.0, max_tokens=None, ignore_eos=True, seed=i)
        engine.add(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling, arrival_s=i))

    def step():
        deltas = engine.step()
        began_s = time.thread_time()
        frame(Deltas(deltas, report.due()))
        spent_s["messages"] += time.thread_time() - began_s

    clocks = {
        "control": lambda: time.thread_time() - target.run_s - spent_s["messages"],
        "messages": lambda: spent_s["messages"],
        "sum": lambda: time.thread_time() - target.run_s,
    }
    for arm, own in {"drafts": None, "no drafts": Never()}.items():
        control._guards.current = own
        for _ in range(60):
            step()
        for part, clock in clocks.items():
            measure(f"{arm}, {part}, {count}", step, clock)
'''


def main() -> None:
    parser = options_of(__doc__, rounds=3, blocks=6, steps=20)
    parser.add_argument("--sequences", type=numbers, default=[*SEQUENCES])
    parser.add_argument("--questions", type=Path, required=True, help="a file of Spec-Bench")
    options = parser.parse_args()
    found = compare(RUN, options, str(options.questions.resolve()), *map(str, options.sequences))
    result = {
        **about("speed.host_parts"),
        "base": git_commit(options.base),
        "bars_us": {arm: dict(zip(SEQUENCES, bars, strict=True)) for arm, bars in BARS_US.items()},
        "ms": found,
    }
    write_json(options.out, result)
    for kind, each in found.items():
        print(f"{kind:28} {1000 * each['base']:8.1f} {1000 * each['this']:8.1f}  x {each['ratio']}")
