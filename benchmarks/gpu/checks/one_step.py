"""A program: one eager step of two layers of the large model, up to its logits, for a memory checker.

python -m benchmarks.gpu.checks.one_step OUT [--dry-run]
"""

import sys
from pathlib import Path

from benchmarks.gpu.checks.models import STEPS, backend_of, step_logits
from benchmarks.gpu.common.plan import Plan
from benchmarks.gpu.common.shapes import write_shape
from faser.engine.checkpoints.files import read_model_config


def main(out: Path, dry_run: bool) -> None:
    plan = Plan(out=out, dry_run=dry_run)
    spec = read_model_config(write_shape(plan.models / "checked", plan.sizes.checked[0])).spec
    first = next(iter(STEPS))
    logits = step_logits(plan, spec, backend_of(plan), steps={first: STEPS[first]})[first]
    sys.stdout.write(f"{int(logits.isfinite().all())} {len(logits)} rows\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--dry-run" in sys.argv[2:])
