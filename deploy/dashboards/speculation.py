"""Drafts: what is drafted, verified, accepted and wasted, what steps take, and what it gains."""

from deploy.dashboards.expressions import CHOSEN, in_order, last_hour, mean, rate, ratio
from deploy.dashboards.panel import Panel, Row
from deploy.prometheus.make_rules import THRESHOLDS

ACCEPTED, VERIFIED = "faser_spec_accepted_tokens_total", "faser_spec_verified_tokens_total"
DRAFTED = "faser_spec_drafted_tokens_total"
VLLM_ACCEPTED_AT = "vllm:spec_decode_num_accepted_tokens_per_pos_total"
ACCEPTED_AT, VERIFIED_AT = "faser_spec_accepted_tokens_per_pos_total", "faser_spec_verified_tokens_per_pos_total"
PREDICTED, MEASURED = "faser_step_predicted_seconds_total", "faser_step_measured_seconds_total"
STEP, FIRST_FOUR = 'role="step"', 'position=~"[0-3]"'
REQUEST_ACCEPTANCE = "faser_request_spec_acceptance_rate"


def per_step(metric: str) -> str:
    """Seconds of a step: the sum of a counter over the number of steps."""
    return ratio(rate(metric, 'role="step"'), rate("faser_step_time_error_ratio_count", 'role="step"'))


SPECULATION = (
    Row(
        "Speedup",
        (
            Panel(
                "Speedup over decoding without drafts",
                (
                    (
                        f'avg by (sequences) (faser_spec_paid_ratio{{{CHOSEN},bound="mean"}})',
                        "{{sequences}} at once",
                    ),
                ),
                least=None,
                lines=(1,),
                note="Tokens per second with drafts over those without, as measured in turns, by the number of "
                "sequences that decode. 1: no gain; below it sequences of that load draft nothing.",
            ),
            Panel(
                "Time saved by drafts",
                tuple(
                    (f'sum(faser_spec_saved_seconds{{{CHOSEN},bound="{bound}"}})', text)
                    for bound, text in (("mean", "saved"), ("low", "at least"), ("high", "at most"))
                ),
                "s",
                least=None,
                lines=(0,),
                note="Seconds that drafts have saved since the servers started, and bounds that hold at all "
                "times (95 %): drafts cannot have cost more than the lowest line is below 0.",
            ),
            Panel(
                "Mean acceptance length",
                (
                    (
                        "1 + "
                        + ratio(
                            rate("vllm:spec_decode_num_accepted_tokens_total"),
                            rate("vllm:spec_decode_num_drafts_total"),
                        ),
                        "accepted + 1",
                    ),
                ),
                note="Tokens per sample and verification step. 1: speculation brought nothing.",
            ),
            Panel(
                "Output tokens from drafts",
                ((ratio(rate(ACCEPTED), rate("vllm:generation_tokens_total")), "share"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Acceptance rate, by drafter",
                ((ratio(rate(ACCEPTED, by="method"), rate(VERIFIED, by="method")), "{{method}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Policy and method",
                (
                    (f"faser_spec_policy_info{{{CHOSEN}}}", "{{policy}}, drafts by {{method}}"),
                    (f"faser_spec_synthetic{{{CHOSEN}}} == 1", "SYNTHETIC: answers are not the model's"),
                ),
                kind="stat",
                instant=True,
            ),
            Panel(
                "Processor partition",
                ((f"faser_spec_partition_info{{{CHOSEN}}}", "{{partition}} {{fallback}}"),),
                kind="stat",
                instant=True,
                note="serial: drafting and verification take turns. A text after the name says why it is not "
                "the partition that was asked for.",
            ),
        ),
    ),
    Row(
        "Draft token flow",
        (
            Panel(
                "Draft token funnel (last hour)",
                (
                    (last_hour(DRAFTED), "drafted"),
                    (last_hour("faser_spec_pruned_tokens_total"), "  pruned before they were verified"),
                    (last_hour("vllm:spec_decode_num_draft_tokens_total"), "sent to the target model"),
                    (last_hour(VERIFIED), "verified"),
                    (last_hour("faser_spec_wasted_tokens_total"), "  rejected: wasted"),
                    (last_hour(ACCEPTED), "accepted"),
                ),
                kind="bargauge",
                instant=True,
                note="drafted = pruned + verified; verified = wasted + accepted.",
            ),
            Panel(
                "Drafted, verified and accepted tokens",
                (
                    (rate(DRAFTED), "drafted"),
                    (rate(VERIFIED), "verified"),
                    (rate(ACCEPTED), "accepted"),
                ),
                axis="tokens per second",
                note="The gaps are pruned and wasted tokens.",
            ),
            Panel(
                "Draft tokens, by outcome",
                (
                    (rate(ACCEPTED), "accepted"),
                    (rate("faser_spec_wasted_tokens_total"), "verified and rejected"),
                    (rate("faser_spec_pruned_tokens_total", by="stage"), "pruned: {{stage}}"),
                ),
                stacked=True,
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Acceptance",
        (
            Panel(
                "Acceptance rate, by draft position (last hour)",
                (
                    (
                        in_order(ratio(last_hour(ACCEPTED_AT, "position"), last_hour(VERIFIED_AT, "position"))),
                        "token {{position}}",
                    ),
                ),
                "percentunit",
                kind="bargauge",
                most=1,
                instant=True,
                note="Only drafts that reach the position count. Position 0 is the first token.",
            ),
            Panel(
                "Acceptance rate of the first four positions, by class (last hour)",
                (
                    (
                        ratio(
                            last_hour(ACCEPTED_AT, "class, position", FIRST_FOUR),
                            last_hour(VERIFIED_AT, "class, position", FIRST_FOUR),
                        ),
                        "{{class}}: token {{position}}",
                    ),
                ),
                "percentunit",
                kind="bargauge",
                most=1,
                instant=True,
            ),
            Panel(
                "Acceptance rate, by class",
                ((ratio(rate(ACCEPTED_AT, by="class"), rate(VERIFIED_AT, by="class")), "{{class}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Acceptance rate per request, by class (median)",
                (
                    (
                        f"histogram_quantile(0.5, {rate(REQUEST_ACCEPTANCE + '_bucket', by='le, class')})",
                        "{{class}}",
                    ),
                ),
                "percentunit",
                most=1,
            ),
            Panel(
                "Expected over accepted tokens",
                (
                    (
                        ratio(rate("faser_spec_expected_accepted_tokens_total"), rate(ACCEPTED)),
                        "expected / accepted",
                    ),
                ),
                "percentunit",
                lines=(1,),
            ),
            Panel(
                "Accepted tokens, by draft position",
                ((rate(VLLM_ACCEPTED_AT, by="position"), "token {{position}}"),),
                stacked=True,
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Decisions",
        (
            Panel(
                "Draft length (γ)",
                (
                    (
                        f"sum by (le) (increase(faser_spec_gamma_bucket{{{CHOSEN}}}[$__rate_interval]))",
                        "{{le}}",
                    ),
                ),
                kind="heatmap",
                note="One value per sample and step, zero included.",
            ),
            Panel("Mean draft length (γ), by class", ((mean("faser_spec_gamma", by="class"), "{{class}}"),)),
            Panel(
                "Steps without drafts, by reason",
                ((rate("faser_spec_bypass_steps_total", by="reason"), "{{reason}}"),),
                stacked=True,
                axis="samples and steps per second",
            ),
            Panel(
                "Steps, by mode",
                ((rate("faser_spec_mode_steps_total", by="mode"), "{{mode}}"),),
                stacked=True,
                axis="steps per second",
            ),
            Panel(
                "Mode of the last step",
                ((f"sum by (mode) (faser_spec_mode{{{CHOSEN}}})", "{{mode}}"),),
                stacked=True,
                axis="engines",
            ),
            Panel(
                "Processor share, by lane",
                ((f"avg by (lane) (faser_sm_share{{{CHOSEN}}})", "{{lane}}"),),
                "percentunit",
                most=1,
            ),
            Panel(
                "Mode switches",
                ((rate("faser_spec_mode_switches_total", by="to"), "to {{to}}"),),
                axis="per second",
            ),
        ),
    ),
    Row(
        "Predictions",
        (
            Panel(
                "Step time, predicted and measured",
                ((per_step(PREDICTED), "predicted"), (per_step(MEASURED), "measured")),
                "s",
                note="Includes the time to draft for the step.",
            ),
            Panel(
                "Predicted over measured step time",
                (
                    (
                        ratio(
                            rate("faser_step_predicted_seconds_total", by="role"),
                            rate("faser_step_measured_seconds_total", by="role"),
                        ),
                        "{{role}}",
                    ),
                ),
                "percentunit",
                lines=(1 - THRESHOLDS["stepTimeError"], 1 + THRESHOLDS["stepTimeError"]),
                note="100 %: the cost model is right on average. Outside the lines for half an hour is an alert.",
            ),
            Panel(
                "Step time prediction error (median)",
                (
                    (
                        f"histogram_quantile(0.5, {rate('faser_step_time_error_ratio_bucket', by='le, role')})",
                        "{{role}}",
                    ),
                ),
                "percentunit",
                lines=(0.1,),
            ),
            Panel(
                "Time spent drafting, verifying and deciding",
                (
                    (rate("faser_spec_draft_seconds_total"), "drafting"),
                    (rate("faser_spec_verify_seconds_total"), "verifying"),
                    (rate("faser_spec_overlap_seconds_total"), "both at once"),
                    (rate("faser_spec_decide_seconds_total"), "deciding"),
                ),
                "percentunit",
                note="Share of the wall clock.",
            ),
            Panel(
                "Draft KV recomputed after a pause",
                ((rate("faser_spec_catchup_tokens_total"), "tokens"),),
                axis="tokens per second",
                note="With a draft model only.",
            ),
            Panel(
                "Damaged drafter states replaced (last hour)",
                ((last_hour("faser_drafter_rebuilds_total", "drafter, cause"), "{{drafter}}, {{cause}}"),),
                lines=(1,),
                note="Found because acceptance had collapsed. Answers are right even so.",
            ),
            Panel(
                "Early pruning",
                (
                    (rate("faser_prune_steps_total", by="kind"), "{{kind}} steps"),
                    (rate("faser_prune_drafted_rows_total"), "draft rows looked at"),
                    (rate("faser_prune_rows_total"), "draft rows pruned"),
                    (rate("faser_prune_wasted_rows_total"), "draft rows kept in vain"),
                ),
                axis="per second",
                note="Off by default.",
            ),
            Panel(
                "Early pruning accuracy",
                (
                    (rate("faser_prune_verified_tokens_total"), "looked at and verified"),
                    (rate("faser_prune_flagged_tokens_total"), "flagged"),
                    (rate("faser_prune_false_tokens_total"), "flagged wrongly"),
                ),
                axis="tokens per second",
            ),
        ),
    ),
    Row(
        "Audit (--audit-speculation)",
        (
            Panel(
                "Audited answers (last hour)",
                ((last_hour("faser_audit_checks_total", "backend"), "{{backend}}"),),
                note="Does not grow on an engine that is never idle.",
            ),
            Panel(
                "Diverged answers (last hour)",
                ((last_hour("faser_audit_divergences_total", "backend"), "{{backend}}"),),
                lines=(1,),
                note="One with the backend native is an alert. Other kernels can differ from themselves where two "
                "tokens are nearly as likely.",
            ),
            Panel(
                "Answers skipped by the audit (last hour)",
                ((last_hour("faser_audit_skipped_total", "backend"), "{{backend}}"),),
            ),
        ),
    ),
)
