"""What training minimises: cross-entropy with the target's distribution, over the drafts of every position.

Step s weighs STEP_DECAY ** s, as in EAGLE-3's training code. A distribution is the target's at temperature 1, cut
to the head's vocabulary: what it gives to other tokens counts for nothing.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from faser.distill.training.arithmetic import linear_cross_entropy
from faser.distill.training.batch import Batch
from faser.distill.training.trainable_head import TrainableHead

STEP_DECAY = 0.8


@dataclass(frozen=True, slots=True, kw_only=True)
class Unrolled:
    """loss: scalar with a gradient, the mean over drafting rows. drafts: [S, N] int64, the head's best rows."""

    loss: Tensor
    drafts: Tensor


def unrolled_loss(head: TrainableHead, batch: Batch, steps: int) -> Unrolled:
    outputs = head.outputs(batch, steps)
    scale = torch.tensor([STEP_DECAY**step for step in range(steps)], device=head.device)
    weights = batch.valid.float() * (scale / (scale.sum() * batch.valid.shape[1]))[:, None]
    loss, drafts = linear_cross_entropy(
        head.logits_input(torch.cat(outputs)),
        head.head(),
        batch.wanted_ids.flatten(0, 1),
        batch.wanted_probs.flatten(0, 1),
        weights.flatten(),
    )
    return Unrolled(loss=loss, drafts=drafts.view(steps, -1))
