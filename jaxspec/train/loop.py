"""The training loop: Muon or AdamW under a warm-up and a cosine, data-parallel, resumable.

A step depends on the state (params, moments), its number, the data and the run's settings. Batches, anchors and
learning rates are functions of the number. So a run that was killed continues from its last checkpoint to the very
losses it would have had. An output folder belongs to one run: `run.json` says which.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Container
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from tqdm import tqdm

from jaxspec.compiling.xla_options import NOTHING_TIMED
from jaxspec.train.data import TrainError
from jaxspec.train.folder import agree, as_stored, make, read, write
from jaxspec.train.interrupted import Interrupted, Stop
from jaxspec.train.objective import Objective, Read, Report
from jaxspec.train.packing import Packed

# XLA looks for Triton's best tiling of each softmax, which takes most of a compilation (EAGLE-3's step for an H200: 12
# seconds of a core without, 40 with), and spares a step 5% of its bytes. A run of fewer minutes than this does without.
LONG_RUN = 10.0
WITHOUT_TILINGS = {"xla_disable_hlo_passes": "triton-softmax-rewriter"}
TIMED_STEPS = 30  # after which a budget in minutes becomes one in steps
_COMPILING = 3  # first steps that aren't timed
PEAK_FLOPS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12}  # dense bfloat16, a device


@dataclass(frozen=True)
class Settings:
    """**Arguments:** `steps` or `minutes`: the budget, exactly one of them. `save_every`, in seconds. `warm_up`, in
    steps. `optimizer`: adamw, or muon (https://arxiv.org/abs/2502.16982) for matrices within the network.
    `weight_decay` is on matrices alone. `log_every`, in steps."""

    steps: int | None = None
    minutes: float | None = None
    learning_rate: float = 1e-3
    warm_up: int = 100
    optimizer: str = "muon"
    weight_decay: float = 0.01
    clip: float = 1.0
    seed: int = 0
    log_every: int = 10
    save_every: float = 60.0

    def __post_init__(self):
        if (self.steps is None) == (self.minutes is None):
            raise TrainError("give either --steps or --minutes")
        for name in ("steps", "minutes", "learning_rate", "clip", "log_every"):
            value = getattr(self, name)
            if value is not None and not 0 < value < np.inf:
                raise TrainError(f"--{name.replace('_', '-')} must be positive, got {value}")
        for name in ("warm_up", "weight_decay", "save_every"):
            if not 0 <= (value := getattr(self, name)) < np.inf:
                raise TrainError(f"--{name.replace('_', '-')} must be at least 0, got {value}")


class Run:
    """An output folder: `run.json`, `metrics.jsonl`, `checkpoints/`.

    **Raises:** `TrainError` if the folder holds a run with other settings.
    """

    def __init__(self, folder: Path, facts: dict[str, Any]):
        self.folder, self.file, self.metrics = folder, folder / "run.json", folder / "metrics.jsonl"
        make(folder)
        self._settings = as_stored(facts)
        self.steps = check_run(folder, facts)

    def claim(self, steps: int | None) -> None:
        """Note in the folder that it is this run's, and how many steps that has in all, once it is known."""
        self.steps = steps
        write(self.file, {"settings": self._settings, "steps": steps})

    def log(self, record: dict[str, Any]) -> None:
        with self.metrics.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def cut(self, step: int) -> None:
        """Forget what was logged behind a checkpoint: it is about to be done again."""
        kept = [record for record in self.history() if record["step"] <= step]
        self.metrics.write_text("".join(json.dumps(record) + "\n" for record in kept))

    def history(self) -> list[dict[str, Any]]:
        return history(self.folder)


def history(folder: Path) -> list[dict[str, Any]]:
    """A run's logged lines, in order; a line that was cut off by a kill is left out."""
    if not (metrics := folder / "metrics.jsonl").exists():
        return []
    return [json.loads(line) for line in metrics.read_text().split("\n")[:-1]]


def check_run(folder: Path, facts: dict[str, Any], later: Container[str] = ()) -> int | None:
    """The number of steps of the run that the folder holds, if it holds one and knows it.

    **Raises:** `TrainError` if that run has other settings, those that are known `later` left out.
    """
    if not (file := folder / "run.json").exists():
        return None
    record = read(file)
    theirs, steps = (record.get("settings"), record.get("steps")) if isinstance(record, dict) else (record, None)
    agree(folder, "another run", theirs, as_stored(facts), later)
    return steps


def finished(folder: Path, steps: int | None) -> bool:
    """Whether a run of so many steps came to its end, and saved its drafter."""
    saved = (folder / "drafter" / "model.safetensors").exists()
    return saved and steps is not None and any(record["step"] == steps for record in history(folder)[-1:])


def check_batch(batch_size: int) -> None:
    """**Raises:** `TrainError` if the devices can't share a batch."""
    if batch_size % (devices := len(jax.devices())):
        raise TrainError(f"--batch-size {batch_size} must be a multiple of the {devices} devices present")


def train(
    run: Run, objective: Objective, trained: Any, frozen: Any, target_params: Any, data: Packed, settings: Settings,
    read: Read | None = None,
) -> Any:  # fmt: skip
    """Train to the end of the budget, from the run's last checkpoint if it has one; the trained params.

    `read`: the forward of a target whose layers aren't among `target_params`, since devices divide them.

    **Raises:** `TrainError` if the batch can't be shared by the devices, or the loss is no longer a number;
    `Interrupted` for a Ctrl-C, once the step that it came in is done and saved.
    """
    check_batch(data.batch_size)
    mesh = Mesh(np.array(jax.devices()), ("data",))
    everywhere, shared = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("data"))
    optimizer = optimizer_of(settings)
    run_step = step_function(objective, optimizer, mesh, (settings.minutes or LONG_RUN) < LONG_RUN)
    state = jax.device_put({"params": trained, "moments": optimizer.init(trained)}, everywhere)
    frozen, target_params = jax.device_put((frozen, target_params), everywhere)
    run.claim(run.steps or settings.steps)
    key = jax.random.key(settings.seed)
    kept, options = (run.folder / "checkpoints").resolve(), ocp.CheckpointManagerOptions(max_to_keep=2)
    with Stop() as stop, ocp.CheckpointManager(kept, options=options) as manager:
        step, state = _restore(manager, run, state)
        clock, ended = _Clock(settings, run), False
        with closing(Meter(run, objective, trained, data, step)) as meter:
            while (run.steps is None or step < run.steps) and not ended:
                batch = data.batch(step)
                batch = jax.device_put(batch if read is None else batch.replace(kept=read(batch)), shared)
                rate = np.float32(learning_rate(settings, step, run.steps))
                done = np.float32(0 if run.steps is None else step / run.steps)
                state, report = run_step(state, frozen, target_params, batch, rate, jax.random.fold_in(key, step), done)
                step += 1
                clock.tick(step, report)
                if step % settings.log_every == 0 or step == run.steps:
                    meter.show(step, report, float(rate))
                ended = stop.asked
                if clock.save_due() or step == run.steps or ended:
                    manager.save(step, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    if ended:
        raise Interrupted(f"interrupted at step {step}; the same command resumes")
    return jax.device_get(state["params"])


def learning_rate(settings: Settings, step: int, steps: int | None) -> float:
    """Rises over the warm-up, then follows a cosine to a hundredth. While `steps` isn't known, it only rises."""
    rise = min((step + 1) / settings.warm_up, 1.0) if settings.warm_up else 1.0
    if steps is None or step < settings.warm_up:
        return settings.learning_rate * rise
    done = (step - settings.warm_up) / max(steps - settings.warm_up, 1)
    return settings.learning_rate * (0.01 + 0.99 * 0.5 * (1 + np.cos(np.pi * min(done, 1.0))))


def optimizer_of(settings: Settings) -> optax.GradientTransformation:
    """Optimizer whose updates are those of a learning rate of 1."""
    matrices = lambda params: jax.tree.map(lambda x: x.ndim > 1, params)  # noqa: E731
    clip = optax.clip_by_global_norm(settings.clip)
    if settings.optimizer == "muon":
        muon = optax.contrib.muon(
            1.0,
            weight_decay=settings.weight_decay,
            adam_b1=0.9,
            adam_b2=0.95,
            consistent_rms=0.2,  # updates as large as AdamW's, so that its learning rates hold
            muon_weight_dimension_numbers=_inner,
        )
        return optax.chain(clip, muon)
    adam = optax.scale_by_adam(b1=0.9, b2=0.95)
    return optax.chain(clip, adam, optax.add_decayed_weights(settings.weight_decay, matrices), optax.scale(-1.0))


def _inner(params: dict[str, Any]) -> dict[str, Any]:
    """Which params Muon is for. Columns of a head and rows of an embedding are tokens, each a vector by itself; so is
    what makes one number of a row."""
    vectors = {
        *("head", "embed", "markov_before", "markov_after", "confidence", "domino_after"),
        *("before", "after", "attention_conv", "mlp_conv"),
        *("slot_embedding", "rank_embedding", "relative_slot_bias"),
    }

    def of(path: tuple, x: jax.Array) -> optax.contrib.MuonDimensionNumbers | None:
        names = {getattr(key, "key", None) for key in path}
        return optax.contrib.MuonDimensionNumbers() if x.ndim > 1 and not names & vectors else None

    return jax.tree_util.tree_map_with_path(of, params)


def step_function(
    objective: Objective, optimizer: optax.GradientTransformation, mesh: Mesh, short: bool = False
) -> Callable:
    """Each device takes the gradient of its own rows, which compilers can't be left to find out: our kernels, for one,
    are opaque to them. The sum over devices, by what their drafts weigh, is the whole batch's. `short`: the run is."""

    def gradients(params, frozen, target_params, batch, keys, done):
        loss = jax.value_and_grad(objective.loss, has_aux=True)
        (_, report), own = loss(params, frozen, target_params, batch, keys, done)
        total = jax.lax.psum(report.weight, "data")
        share = report.weight / total
        own, report = jax.lax.psum(
            (jax.tree.map(lambda g: g * share, own), report.replace(loss=report.loss * share)), "data"
        )
        return own, report

    everywhere, rows = PartitionSpec(), PartitionSpec("data")
    specs = everywhere, everywhere, everywhere, rows, rows, everywhere
    shared = jax.shard_map(gradients, mesh=mesh, in_specs=specs, out_specs=everywhere, check_vma=False)

    def step(state, frozen, target_params, batch, rate, key, done):
        keys = jax.random.split(key, len(batch.tokens))
        gradients, report = shared(state["params"], frozen, target_params, batch, keys, done)
        updates, moments = optimizer.update(gradients, state["moments"], state["params"])
        params = jax.tree.map(lambda p, u: p + rate * u, state["params"], updates)
        return {"params": params, "moments": moments}, report

    # To compile and time candidates for its products takes XLA longer than hundreds of steps.
    options = NOTHING_TIMED | (WITHOUT_TILINGS if short else {})
    return jax.jit(step, donate_argnums=0, compiler_options=options)


def _restore(manager: ocp.CheckpointManager, run: Run, state: Any) -> tuple[int, Any]:
    step = manager.latest_step()
    run.cut(step or 0)
    if step is None:
        return 0, state
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state)
    return step, manager.restore(step, args=ocp.args.StandardRestore(abstract))


class _Clock:
    """When to save, and what a budget in minutes comes to in steps."""

    def __init__(self, settings: Settings, run: Run):
        self._settings, self._run = settings, run
        self._saved = self._started = time.monotonic()
        self._ticks = 0
        self._tell()

    def _tell(self) -> None:
        steps, warm_up = self._run.steps, self._settings.warm_up
        if steps is not None and warm_up >= steps:
            tqdm.write(
                f"--warm-up {warm_up} is not less than the run's {steps} steps, so the learning rate rises to the end; "
                f"--warm-up {steps // 10} would suit it",
                sys.stderr,
            )

    def tick(self, step: int, report: Report) -> None:
        self._ticks += 1
        if self._run.steps is not None or self._ticks not in (_COMPILING, TIMED_STEPS):
            return
        jax.block_until_ready(report)
        if self._ticks == _COMPILING:
            self._started = time.monotonic()
            return
        each = (time.monotonic() - self._started) / (TIMED_STEPS - _COMPILING)
        left = self._settings.minutes * 60 - each * TIMED_STEPS
        self._run.claim(step + max(int(left / each), 1))
        self._tell()

    def save_due(self) -> bool:
        # Not before the number of steps is settled: up to there, learning rates don't depend on it.
        if self._run.steps is None or time.monotonic() - self._saved < self._settings.save_every:
            return False
        self._saved = time.monotonic()
        return True


class Meter:
    """The progress bar and `metrics.jsonl`: loss, acceptance by position, tokens a second, MFU."""

    def __init__(self, run: Run, objective: Objective, trained: Any, data: Packed, step: int):
        self._run, self._at, self._step = run, time.monotonic(), step
        self._tokens = data.batch_size * data.row_length
        devices = jax.devices()
        peak = next((f for name, f in PEAK_FLOPS.items() if name in devices[0].device_kind), None)
        flops = objective.flops(trained, data.row_length)
        self._utilisation = None if peak is None else flops / (peak * len(devices))
        self._bar = tqdm(total=run.steps, initial=step, desc="training", unit="step")

    def show(self, step: int, report: Report, rate: float) -> None:
        """**Raises:** `TrainError` if the loss is no longer a number."""
        report, now = jax.device_get(report), time.monotonic()
        if not np.isfinite(report.loss):
            raise TrainError(
                f"the loss is {report.loss} at step {step}: start anew in another --output with a lower --learning-rate"
            )
        speed = (step - self._step) * self._tokens / (now - self._at)
        stand = report.accepted / np.maximum(report.rounds, 1.0)
        record = {
            "step": step,
            "loss": float(report.loss),
            "accepted": [round(float(x), 4) for x in stand],
            "accept_length": round(1 + float(stand.sum()), 4),
            "learning_rate": rate,
            "tokens_per_s": round(speed),
        }
        if self._utilisation is not None:
            record["mfu"] = round(self._utilisation * speed, 4)
        self._run.log(record)
        self._bar.total = self._run.steps
        self._bar.update(step - self._step)
        live = "/".join(f"{x:.2f}" for x in stand[:5])
        self._bar.set_postfix_str(f"loss {report.loss:.3f}, accepted {live}, {speed:,.0f} tokens/s")
        self._at, self._step = now, step

    def close(self) -> None:
        self._bar.close()


def parameter_bytes(trained: Any) -> int:
    """Bytes of the drafter as it is saved, in bfloat16."""
    return 2 * sum(x.size for x in jax.tree.leaves(trained))
