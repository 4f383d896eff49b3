"""The sections of a config that are values alone, with the base class of every section.

A section is frozen and refuses unknown keys. The string under a field is its help.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from trivium.config.field_help import field_help
from trivium.config.fields import ConfigPath, free
from trivium.types import Sampling, SaveStrategy, SyncMethod, SyncStyle


class BaseConfig(BaseModel):
    """Base of every section: frozen, no unknown keys, field docstrings are the help."""

    model_config = ConfigDict(
        frozen=True,
        defer_build=True,
        extra="forbid",
        validate_default=True,
        allow_inf_nan=False,
        protected_namespaces=(),
    )

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        for name, text in field_help(cls).items():
            field = cls.__pydantic_fields__[name]
            field.description = field.description or text


class SamplingConfig(BaseConfig):
    """How completions are sampled."""

    max_new_tokens: int = Field(default=256, ge=1)
    """Longest completion, in tokens."""
    temperature: float = Field(default=1.0, ge=0)
    """Divides the logits; 0 is greedy (evaluation only)."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus sampling: keep the most probable tokens whose probabilities sum to this. The kept tokens are recorded,
    and the trainer computes log-probabilities over the same ones."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most probable tokens; 0 keeps all. Recorded as with `top_p`."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep the tokens whose probability is at least this fraction of the most probable token's; 0 keeps all. It acts
    before `top_k` and `top_p`. Recorded as with `top_p`."""
    min_new_tokens: int = Field(default=0, ge=0)
    """End of sequence is impossible before this many tokens. Recorded as with `top_p`."""
    stop: tuple[str, ...] = ()
    """Strings that end a turn."""

    def sampling(self) -> Sampling:
        """The settings as the `Sampling` of a request."""
        return Sampling(**self.model_dump())

    def changes_distribution(self) -> list[str]:
        """The settings that make the sampled distribution differ from softmax(logits / temperature)."""
        neutral = {"top_p": 1.0, "top_k": 0, "min_p": 0.0, "min_new_tokens": 0}
        return [name for name, value in neutral.items() if getattr(self, name) != value]


class ThresholdConfig(BaseConfig):
    """A threshold that ends a stage early."""

    metric: str = "train/loss/policy"
    """A metric of every train step that does not depend on the machine, or of the evaluations after train steps
    (`evaluation.every`)."""
    below: float | None = None
    """The stage ends with the first step that reports a smaller value."""
    above: float | None = None
    """The stage ends with the first step that reports a larger value."""


class SyncSection(BaseConfig):
    """When and how weights reach the explorers."""

    method: Annotated[SyncMethod | str, Field(union_mode="left_to_right")] = SyncMethod.MEMORY
    """`memory` (one process, or Ray's object store), `checkpoint` (files in a directory that both sides see), `nccl`
    (a broadcast: nccl between GPUs, gloo between CPUs); further channels by name or path."""
    style: SyncStyle = SyncStyle.FIXED
    """Who decides when: `fixed` publishes every `interval` steps; `dynamic_by_trainer` asks the explorers every
    `interval` steps; `dynamic_by_explorer` publishes when an explorer asks, after every `interval` steps' worth of
    groups. An explorer without a free slot is served after `interval` steps, or as soon as the trainer waits for
    groups."""
    interval: int = Field(default=1, ge=1)
    """Train steps between two publications; with `dynamic_by_explorer`, steps' worth of groups between two requests."""
    offset: int | None = Field(default=None, ge=0)
    """Another way to say `max_staleness = interval - 1 + offset`."""
    in_flight: Literal["finish", "update"] = "finish"
    """What happens to completions in progress when new weights arrive: `finish` completes them with the old weights
    first; `update` continues them with the new weights from the next token, and records which version sampled each."""
    dir: ConfigPath | None = free(None)
    """Directory of the `checkpoint` method, for this run alone, that all its roles see; unset means `sync` in the run
    directory."""
    full_every: int = free(1, ge=1)
    """With the `checkpoint` method, one of so many versions is written whole; the others hold only the elements that
    changed since the version before. Trainer and explorers then keep the weights of a version in host memory. In
    bfloat16 at the learning rates of RL, a version takes a few percent of its bytes."""
    deadline_s: float = free(3600.0, gt=0)
    """Longest wait of one side for the other."""
    heartbeat_s: float = free(10.0, gt=0)
    """A role in another process counts as dead after this time without a heartbeat."""


class EvaluationSampling(BaseConfig):
    """How evaluation samples: as the engine does in training unless set, and greedily where one sample is enough."""

    max_new_tokens: int | None = Field(default=None, ge=1)
    """Longest completion, in tokens; unset: `engine.sampling.max_new_tokens`."""
    temperature: float | None = Field(default=None, ge=0)
    """Divides the logits; 0 is greedy. Unset: 0 for one sample per task, `engine.sampling.temperature` for several."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Nucleus truncation."""
    top_k: int = Field(default=0, ge=0)
    """Keep the k most probable tokens; 0 keeps all."""
    min_p: float = Field(default=0.0, ge=0, le=1)
    """Keep the tokens whose probability is at least this fraction of the most probable token's; 0 keeps all."""
    min_new_tokens: int = Field(default=0, ge=0)
    """End of sequence is impossible before this many tokens."""
    stop: tuple[str, ...] | None = None
    """Strings that end a turn; unset: `engine.sampling.stop`."""

    def sampling(self, training: SamplingConfig, samples: int) -> Sampling:
        """The settings as the `Sampling` of a request, for `samples` samples per task; unset fields are as in
        training."""
        settings, other = self.model_dump(), training.model_dump()
        other["temperature"] = other["temperature"] if samples > 1 else 0.0
        return Sampling(**{name: other[name] if value is None else value for name, value in settings.items()})


class EvaluationSection(BaseConfig):
    """Held-out tasks, rolled out with fixed weights; `null` switches evaluation off."""

    taskset: str | None = None
    """Which taskset to evaluate; unset means no evaluation."""
    held_out: str | None = None
    """Taskset for the held-out loss, at the start and the end of a stage that learns from rows (`buffer.kind: files`):
    `eval/NAME/loss`, and for pairs `eval/NAME/preference_accuracy`. Nothing is sampled."""
    every: int = free(0, ge=0)
    """Train steps between evaluations; 0 evaluates at the start and the end of the last stage only."""
    samples: int = Field(default=1, ge=1)
    """Trajectories per task."""
    k: tuple[int, ...] = (1,)
    """The k of pass@k and maj@k; each at most `samples`."""
    sampling: EvaluationSampling = EvaluationSampling()
    """How evaluation samples."""
    observations: bool | None = free(None)
    """Whether to report the cross-entropy of what the environment answered between the policy's turns
    (`eval/NAME/observation_loss`). Unset: only if the algorithm trains on these tokens (`observation_coef`) and the
    engine can compute it."""
    threshold: float | None = None
    """A total reward of at least this counts as right. Unset, it is 1, and the console and the summary show an accuracy
    only where every reward is -1, 0 or 1."""


class CheckpointSection(BaseConfig):
    """When checkpoints are written, and which are kept."""

    save_every: int = free(50, ge=0)
    """Train steps between checkpoints; 0 saves at the end of each stage only."""
    keep: int = free(3, ge=1)
    """Newest checkpoints to keep."""
    keep_best: str | None = free(None)
    """A metric of the evaluation whose best checkpoint is kept as well, for example `eval/test/accuracy`."""
    asynchronous: bool = free(False)
    """Writes checkpoints during training, from a copy in host memory that is as large as weights and optimizer. The
    next save and the end of a stage wait for it."""
    save_strategy: SaveStrategy = free(SaveStrategy.UNRESTRICTED)
    """Who may write at the same time: `single_thread`, `single_process`, `single_node`, `unrestricted`."""
    remote: str | None = free(None)
    """Where complete checkpoints are copied to as well: an fsspec URL (`s3://bucket/run`, `file:///mnt/run`)."""


class ClusterSection(BaseConfig):
    """Where the roles run and what they may use."""

    kind: Literal["local", "ray"] = free("local")
    """`local` keeps the roles of this command in its process (with `train.own_process`, the trained models have another
    one); `ray` makes each role an actor."""
    address: str | None = free(None)
    """A running Ray cluster (`auto`, `host:port`, `ray://...`); unset starts one on this machine for the run."""
    explorers: int = free(1, ge=1)
    """Explorer actors."""
    engines: int = free(1, ge=1)
    """Engine actors of each explorer; requests go to the least busy one."""
    ranks: int = free(1, ge=1)
    """Processes that train together. With Ray they are actors beside the trainer's: each with its own GPU for training
    on GPUs, else all on one machine. Without Ray, `torchrun` starts this number."""
    max_restarts: int = free(2, ge=0)
    """How often explorers and engines that died are started again before their death ends the run. After the death of
    another process that the command started (`train.own_process`; trainer, ranks and hosts on Ray), the run continues
    from the last checkpoint, as often."""
    threads: int = free(0, ge=0)
    """Threads for model work of each role. 0: all cores, or half of them each if engine and trainer compute at the same
    time (`train.own_process`). Results are bit-equal only at equal thread counts."""


class ServeSection(BaseConfig):
    """The endpoint of `run.mode: serve` and `tinker`."""

    host: str = free("127.0.0.1")
    """Address to listen on."""
    port: int = free(8010, ge=0, le=65535)
    """Port to listen on; 0 takes a free one, written to `serve.json` in the run directory, or with `run.explorer: NAME`
    to `serve-NAME.json`."""
    model: str = free("policy")
    """The model name that clients request."""
    names: tuple[str, ...] = free(())
    """Further names of the base model (`run.mode: tinker`). Its path is one as well."""
    max_models: int = free(8, ge=1)
    """Adapters in memory at once (`run.mode: tinker`)."""
    key_variable: str | None = free(None)
    """Environment variable with the key that clients must present; unset admits every client."""
    idle_s: float = free(3600.0, gt=0)
    """Seconds without a call or feedback after which a conversation is dropped, and counted; with `run.mode: tinker`,
    without a sign of life after which a client's models are dropped."""
    unstarted_idle_s: float = free(300.0, gt=0)
    """Seconds after which a conversation with one call and no feedback is dropped: it may not come from an agent."""
    require_secret: bool = free(False)
    """Whether every session must begin with a `secret` of its client, which later requests about it have to repeat."""
    max_connections: int = free(512, ge=1)
    """Largest number of connections. A further one replaces the longest idle one, or is refused."""
    max_body_bytes: int = free(4 * 2**20, ge=1024)
    """Largest request, in bytes."""
    linger_s: float = free(0.0, ge=0)
    """How long the final policy is served after the last step, in seconds; nothing is recorded then."""
