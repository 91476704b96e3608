"""Makes the executor from the loaded parts of an engine: sampler, drafter, verifier, early pruning."""

from collections.abc import Callable

from faser.engine.execution.drafter_registry import DrafterParts, DraftModelParts, head_versions, make_drafter
from faser.engine.execution.drafters.draft_kv_cache import DraftKvCache
from faser.engine.execution.drafters.drafter import Drafter
from faser.engine.execution.model_executor import ModelExecutor, SpeculativeExecution
from faser.engine.execution.pruning import EarlyPruning, PlainForward
from faser.engine.execution.runner.batch import BlockTable
from faser.engine.execution.sampling.processors import make_logits_processors
from faser.engine.execution.sampling.sampler import Sampler
from faser.engine.execution.sampling.verify import make_verifier
from faser.engine.execution.startup.parts import EngineParts
from faser.engine.structure.sequence_matchers import SequenceMatchers
from faser.types import ProgressCallback

WrapDrafter = Callable[[Drafter], Drafter]


def make_executor(
    parts: EngineParts, pruning: EarlyPruning | None, wrap_drafter: WrapDrafter, report: ProgressCallback
) -> ModelExecutor:
    """pruning: None runs all rows through all layers. wrap_drafter: given the drafter, returns the one to use.

    report: as in build.
    """
    config, target, backend = parts.config, parts.target, parts.backend
    vocab_size, eos_token_ids = target.decoder.spec.vocab_size, target.config.eos_token_ids
    matchers = SequenceMatchers(parts.grammars, num_threads=config.threads)
    sampler = Sampler(
        config.max_num_seqs,
        vocab_size,
        eos_token_ids,
        backend.sampling_kernels,
        make_logits_processors(vocab_size, eos_token_ids, matchers, backend.mask_kernel),
    )
    table = BlockTable(config.max_num_seqs, -(-target.max_positions // parts.kv.block_size))
    return ModelExecutor(
        parts.runner,
        sampler,
        table,
        max_logit_rows=config.max_num_seqs,
        matchers=matchers,
        speculation=_speculation(parts, sampler, matchers, table, pruning, wrap_drafter, report)
        if parts.speculates
        else None,
        samples_in_runner=config.schedules_async,
    )


def _speculation(
    parts: EngineParts,
    sampler: Sampler,
    matchers: SequenceMatchers,
    table: BlockTable,
    pruning: EarlyPruning | None,
    wrap_drafter: WrapDrafter,
    report: ProgressCallback,
) -> SpeculativeExecution:
    config, model = parts.config, None
    if parts.draft is not None and parts.draft_runner is not None:
        model = DraftModelParts(
            runner=parts.draft_runner,
            kv=DraftKvCache(table, num_blocks=parts.kv.num_blocks, block_size=parts.kv.block_size),
            max_positions=parts.draft.max_positions,
        )
    drafter_parts = DrafterParts(
        target=parts.runner,
        table=table,
        sampling=sampler.state,
        matchers=matchers,
        max_rows=config.max_num_batched_tokens,
        model=model,
        head=parts.head,
        samples_in_runner=config.schedules_async,
        progress=report,
        ngram_model=parts.ngram_model,
        text_index_bytes=parts.text_index_bytes,
    )
    own = make_drafter(config.speculation, drafter_parts)
    drafter = wrap_drafter(own)
    return SpeculativeExecution(
        drafter=drafter,
        verifier=make_verifier(config.speculation, sampler),
        forward=pruning or PlainForward(),
        lanes=parts.lanes if drafter.drafts_overlapped else None,
        draft_kv=None if model is None else model.kv,
        states=None if parts.head is None else parts.head.states,
        heads=head_versions(own),
    )
