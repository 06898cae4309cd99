"""Where weights come from and where they go."""

from __future__ import annotations

from dataclasses import dataclass

from slime.config.flags import Section, derived, flag


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckpointConfig(Section):
    """Checkpoints."""

    load: str | None = flag(
        None,
        metavar="DIR",
        doc="Checkpoint to resume, or a Hugging Face directory. Holding neither: start from --ref-load or "
        "--hf-checkpoint.",
    )
    ckpt_step: int | None = flag(None, at_least=0, doc="Iteration to read from --load. Default: the newest.")
    ref_load: str | None = flag(
        None, metavar="DIR", doc="Reference (and initial) weights: a checkpoint or a Hugging Face directory."
    )
    ref_ckpt_step: int | None = flag(None, at_least=0, doc="Iteration to read from --ref-load.")
    save: str | None = flag(None, metavar="DIR", doc="Where checkpoints are written.")
    save_interval: int | None = flag(
        None, at_least=1, doc="Save after every N rollouts; without --save below --output-dir."
    )
    async_save: bool = flag(
        False,
        doc="Write checkpoints while training goes on, from a copy of the state: a save holds up the run for the copy "
        "only, and needs the memory for it.",
    )
    no_save_optim: bool = flag(False, doc="Leave the optimizer's state out of checkpoints.")
    save_hf: str | None = flag(
        None, metavar="DIR", doc="Also write Hugging Face weights; {rollout_id} in the path is filled in."
    )
    keep_checkpoints: int | None = flag(None, at_least=1, doc="Keep only the newest N checkpoints. Default: all.")
    start_rollout_id: int | None = flag(
        None, at_least=0, doc="First rollout id. Default: one after the resumed checkpoint's, else 0."
    )
    resume: bool = derived(
        False,
        doc="Whether load is a checkpoint of an earlier run whose optimizer, "
        "schedule, random state and iteration are continued. Without it a run starts at 0 from the weights of load.",
    )
