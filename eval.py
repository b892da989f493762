"""Sample responses to the prompts of parquet or JSONL files, score them, and say how good the model is.

One process per GPU, each with a vLLM engine; no trainer. Every line of `evaluate_model` runs on all ranks unless
it says otherwise.

    torchrun --nproc_per_node=8 eval.py --model.path DIR --data.files test.parquet --output out.parquet --rollout.n 8
    torchrun --nproc_per_node=8 eval.py --model.path runs/x --data.files test.parquet --output out.parquet
    python eval.py --score-only --data.files out.parquet --output again.parquet --reward.path my_reward.py
    python eval.py --compare runs/a runs/b --output compare.html     # no evaluation: the curves of runs on one page

out.parquet has the input's columns and rows, and per row a list with an entry for every response: `responses`,
`scores` (null: the reward function failed or declined), `predictions` (its `pred`), `finish_reasons` (stop, length),
`response_lengths` (tokens); of conversations also what lib/evaluation/episodes.py says. out.json has the statistics,
out.html shows them with samples. An evaluation that was killed goes on where it was when it is started again.
"""

import json
import shutil
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from lib.config import REQUIRED, parse_cli, reporting_errors
from lib.data import ChatTemplate, Rows
from lib.data.tokenizer import text_of
from lib.dist import World, init_distributed, shutdown_distributed
from lib.engine import RolloutConfig, RolloutEngine, training_sampling
from lib.errors import UserError, check_fields
from lib.evaluation import CompareConfig, compare_runs, render_page, summarise, summary_table
from lib.evaluation.any_model import (
    EvalLoRAConfig,
    EvalModel,
    find_model,
    load_engine_,
    load_eval_prompts,
    what_defines_responses,
)
from lib.evaluation.episodes import episode_of
from lib.evaluation.inputs import (
    EvalDataConfig,
    EvalGroup,
    Parts,
    check_output,
    date_of,
    groups_of,
    only_writer,
    parts_folder,
    read_input,
    write_atomically,
    write_output,
)
from lib.evaluation.of_model import complete
from lib.evaluation.scores import collect_scores, first_rows, submit, try_reward
from lib.launch import check_engines, check_same_config, check_same_prompts
from lib.launch.checks import needs_reward
from lib.model import ModelConfig
from lib.rewards import RewardConfig, Scorer
from lib.secret_values import blank
from lib.stopping import Stopper
from lib.tracking.terminal import Terminal
from lib.turns import TurnsConfig
from lib.turns.kinds import check_rows
from lib.turns.start import Turns, find_kinds, find_turns, open_sampler
from lib.types import Rollout, Sample

ROLLOUT = RolloutConfig(n=1, temperature=0.0, log_probs=False, sleep=False, gpu_memory_utilization=0.9)
"""How an evaluation samples unless told otherwise; its log_probs and sleep are what is so without a trainer."""


@dataclass(frozen=True, kw_only=True)
class EvalScriptConfig:
    """Everything that defines an evaluation. --rollout.n and --rollout.temperature say how it samples.

    Something else: `eval.py --compare RUN RUN` overlays the curves of runs on one page; see --compare --help.
    """

    model: ModelConfig = field(default_factory=ModelConfig)
    lora: EvalLoRAConfig = field(default_factory=EvalLoRAConfig)
    data: EvalDataConfig = field(default_factory=EvalDataConfig)
    rollout: RolloutConfig = ROLLOUT
    turns: TurnsConfig = field(default_factory=TurnsConfig)
    reward: RewardConfig = field(default_factory=RewardConfig)
    output: str = REQUIRED
    """Parquet file to write; a .json and a .html file of the same name are written beside it."""
    generate_only: bool = False
    """Write the responses without scores."""
    score_only: bool = False
    """Score the column `responses` of --data.files; needs no model, no GPU and no torchrun."""
    overwrite: bool = False
    """Replace an existing output, and discard unfinished responses that were sampled with other settings."""
    seed: int = 0
    """Seed of every sampled response."""
    debug: bool = False
    """Show tracebacks also for errors that are the input's."""

    def __post_init__(self) -> None:
        check_fields(self, "", seed=(0 <= self.seed < 2**63, "0 to 2**63 - 1"))
        if self.generate_only and self.score_only:
            raise UserError(
                "nothing is left to do; --generate-only and --score-only; found both, expected one at most; leave both "
                "out to generate and score"
            )
        if self.rollout.n > 1 and self.rollout.temperature == 0 and not self.score_only:
            raise UserError(
                f"--rollout.n {self.rollout.n} with --rollout.temperature 0; greedy responses to one prompt are all "
                "the same; expected a temperature above 0; set --rollout.temperature 1.0, or --rollout.n 1"
            )
        self.turns.check_sampling(self.rollout)
        if self.score_only and self.turns.path is not None:
            raise UserError(
                f"nothing is answered where responses are there already; --score-only; found --turns.path "
                f"{self.turns.path}, expected none; leave out one of the two"
            )
        of_training = RolloutConfig.__annotations__  # the fields that it adds to SamplingConfig and EngineConfig
        chosen = [f"--rollout.{it}" for it in of_training if getattr(self.rollout, it) != getattr(ROLLOUT, it)]
        chosen += ["--model.gradient-checkpointing"] * (self.model.gradient_checkpointing is not None)
        chosen += ["--model.reference-path"] * (self.model.reference_path is not None)
        if chosen:
            raise UserError(
                f"an option that only training has; {', '.join(chosen).replace('_', '-')}; found it set, expected it "
                "left out; leave it out"
            )


def main(cfg: EvalScriptConfig, argv: Sequence[str] | None = None) -> None:
    """The whole evaluation; a LockstepError on any rank ends all of them with one line and its exit code.

    `argv`: the words of the command line; what they do not give, the model or its run decides. None: this process's.
    """
    argv = sys.argv[1:] if argv is None else argv
    with reporting_errors(debug=cfg.debug), Stopper(init_distributed(), at_once=True):
        world = init_distributed()
        samples, scores = not cfg.score_only, not cfg.generate_only
        cfg, note = complete(cfg, argv, cfg.model.path, world, samples=samples, scores=scores)
        evaluate_model(cfg, [note] if note else [])
        shutdown_distributed()


@dataclass(frozen=True, kw_only=True)
class EvalTask:
    """What is evaluated, checked before a model is loaded. The same on all ranks."""

    output: Path
    rows: Rows
    table: Any
    """Their columns, of those that are evaluated (pyarrow)."""
    samples: list[Sample]
    kept: Sequence[int]
    """The row of each of these."""
    groups: dict[int, EvalGroup] = field(default_factory=dict)
    """By uid, with --score-only."""
    reward: str
    """A line about the reward function."""
    needs_reward: bool
    """Whether a reward function may be asked."""
    notes: tuple[str, ...]
    model: EvalModel | None = None
    """None with --score-only, as all that follows."""
    stop_ids: Sequence[int] = ()
    turns: Turns | None = None
    date: str | None = None
    state: dict[str, Any] = field(default_factory=dict)
    """What defines the responses."""


def find_task(cfg: EvalScriptConfig, world: World) -> EvalTask:
    """Everything that can be wrong with the input. Raises UserError, RewardError, DamagedCheckpoint."""
    check_same_config(cfg, world)
    output = world.agree(lambda: check_output(cfg.output, cfg.data.files, overwrite=cfg.overwrite))
    scores, has_turns = not cfg.generate_only, cfg.turns.path is not None
    needs_grader = scores and cfg.reward.path is None and not has_turns
    table, rows, warnings = world.agree(
        lambda: read_input(cfg.data, with_responses=cfg.score_only, needs_grader=needs_grader, with_turns=has_turns)
    )
    where = f"--data.files {' '.join(cfg.data.files)}"
    groups = world.agree(lambda: groups_of(table, where)) if cfg.score_only else {}
    kinds = None
    if has_turns:
        kinds = world.on_rank_0(lambda: find_kinds(cfg.turns, first_rows(cfg.data, rows)))
        warnings += world.agree(lambda: check_rows(kinds, rows, len(table)))
    reward, of_episodes = "reward: none", has_turns or any(group.episodes for group in groups.values())
    if scores:
        reward = world.agree(lambda: try_reward(cfg.reward, cfg.data, rows, kinds, of_episodes=of_episodes))
    known = dict(output=output, rows=rows, reward=reward, needs_reward=scores and needs_reward(cfg.reward, kinds))
    if cfg.score_only:
        kept = range(len(table))
        samples = [rows.sample(row, uid=row) for row in kept]
        return EvalTask(**known, table=table, samples=samples, kept=kept, groups=groups, notes=(reward, *warnings))
    world.agree(lambda: check_engines(cfg.rollout, world))
    model = find_model(cfg.model.path, cfg.data, cfg.rollout, world, adapter_path=cfg.lora.path)
    date = world.on_rank_0(lambda: date_of(cfg.output))
    stop_ids, prompts = world.agree(lambda: load_eval_prompts(cfg.data, model, rows, date=date, kinds=kinds))
    check_same_prompts(prompts, prompts, world)
    template = ChatTemplate(model.tokenizer, cfg.data.chat_template_kwargs, date=date)
    turns = world.agree(lambda: find_turns(cfg.turns, kinds, template, stop_ids))
    dtype = str(cfg.model.compute_dtype(world)).removeprefix("torch.")
    state = what_defines_responses(cfg.rollout, model, prompts, stop_ids, dtype=dtype, seed=cfg.seed, turns=turns)
    of_turns = (turns.in_words, *turns.notes) if turns else ()
    return EvalTask(
        **known, table=table.take(list(prompts.kept)), samples=prompts.all_samples(), kept=prompts.kept, model=model,
        stop_ids=stop_ids, turns=turns, date=date, state=state,
        notes=(reward, *of_turns, *warnings, *model.warnings, *prompts.warnings),
    )  # fmt: skip


def evaluate_model(cfg: EvalScriptConfig, notes: Sequence[str] = ()) -> None:
    """Checks the input, generates what is missing, scores, writes. `notes`: what to say first."""
    world = init_distributed()
    task = find_task(cfg, world)
    samples, groups = task.samples, task.groups
    with ExitStack() as stack:
        world.agree(lambda: stack.enter_context(only_writer(task.output)) if world.rank == 0 else None)
        world.agree(
            lambda: check_output(cfg.output, cfg.data.files, overwrite=cfg.overwrite)
        )  # no other process writes it now
        parts, logs = None, None
        if not cfg.score_only:
            parts = Parts(parts_folder(task.output), task.state, world, overwrite=cfg.overwrite)
            groups, logs = parts.groups, parts.folder / "logs"
        terminal = stack.enter_context(Terminal(world, parts and parts.log))
        scorer = None
        if not cfg.generate_only:
            sources = {sample.data_source for sample in samples} if task.needs_reward else set()
            log_path = logs and logs / f"rewards_{world.rank}.log"
            scorer = stack.enter_context(closing(Scorer(cfg.reward, sources, log_path=log_path)))
            for uid in sorted(groups)[world.rank :: world.size]:  # while the engine starts
                submit(scorer, groups[uid], samples[uid])
        finished = [f"{len(groups)} of {len(samples)} prompts are finished already"] * (parts is not None)
        for note in dict.fromkeys((*notes, *task.notes, *finished)):
            terminal.say(note)

        # ---- Generate what is missing; it is scored meanwhile ----
        missing = [sample for sample in samples if sample.uid not in groups]
        if missing:
            generate(cfg, task, missing, parts=parts, scorer=scorer, terminal=terminal)
        scores = {} if scorer is None else collect_scores(scorer, cfg.reward, world, terminal)

        # ---- Write: all of it, then the parts are no longer needed ----
        def write() -> None:
            found = parts.read() if missing else groups
            table = write_results(
                cfg, task, [replace(found[uid], scores=scores.get(uid)) for uid in range(len(samples))]
            )
            if parts is not None:
                parts.delete()
            terminal.say(f"{table}\nwritten: {task.output}, and .json and .html beside it")

        world.agree(lambda: write() if world.rank == 0 else None)


def generate(
    cfg: EvalScriptConfig, task: EvalTask, samples: list[Sample], *, parts: Parts, scorer: Scorer | None,
    terminal: Terminal,
) -> None:  # fmt: skip
    """Generates the groups of these prompts into `parts`, each as soon as its last response ends."""
    world, tokenizer, logs = parts.world, task.model.tokenizer, parts.folder / "logs"
    dtype = task.state["--model.dtype"]
    terminal.say(f"building the engine ({dtype}); what the libraries say goes to {logs}/")
    engine = RolloutEngine(
        cfg.rollout, str(task.model.files.folder), dtype=dtype, max_prompt_len=cfg.data.max_prompt_len,
        most_responses=len(samples) * cfg.rollout.n, stop_token_ids=task.stop_ids, world=world, seed=cfg.seed,
    )  # fmt: skip
    for warning in engine.warnings:
        terminal.say(f"warning: {warning}")
    terminal.say(f"the engine holds the model: all {load_engine_(engine, task.model, world)} tensors were written")
    share, num_tokens, start = engine.share(samples), 0, time.perf_counter()
    conversations = open_sampler(
        task.turns, engine, lambda: ChatTemplate(tokenizer, cfg.data.chat_template_kwargs, date=task.date),
        stop_ids=task.stop_ids, max_prompt_len=cfg.data.max_prompt_len, say=terminal.say,
        split_prompts=cfg.data.control_tokens == "split", log_path=logs / f"turns_{world.rank}.log",
    )  # fmt: skip
    with conversations as sampler, terminal.progress("generating", len(share)) as advance:
        for rollouts in sampler.generate(share, training_sampling(cfg.rollout), stream="validation"):
            if engine.is_leader:
                group = group_of(rollouts, tokenizer, with_turns=task.turns is not None)
                parts.add(group)
                if scorer is not None:
                    submit(scorer, group, rollouts[0].sample)
                num_tokens += sum(group.response_lengths)
            advance()
    parts.check()
    num_tokens, seconds = sum(world.gather(num_tokens)), time.perf_counter() - start
    terminal.say(
        f"generated {len(samples)} prompts x {cfg.rollout.n} responses, {num_tokens} tokens, in {seconds:.1f} s: "
        f"{num_tokens / seconds / world.size:,.0f} tokens per second and rank"
    )


def group_of(rollouts: Sequence[Rollout], tokenizer: Any, *, with_turns: bool) -> EvalGroup:
    """What is kept of the responses to one prompt."""
    return EvalGroup(
        uid=rollouts[0].sample.uid,
        responses=[text_of(tokenizer, rollout) for rollout in rollouts],
        finish_reasons=[rollout.finish_reason for rollout in rollouts],
        response_lengths=[len(rollout.response_ids) for rollout in rollouts],
        episodes=[episode_of(rollout, tokenizer) for rollout in rollouts] if with_turns else None,
    )


def write_results(cfg: EvalScriptConfig, task: EvalTask, groups: Sequence[EvalGroup]) -> str:
    """Writes the three files; the table of results. Executed by rank 0."""
    samples, output = task.samples, task.output
    summaries = summarise(groups, [sample.data_source for sample in samples])
    title = f"{cfg.model.path or 'Responses'} on {', '.join(cfg.data.files)}"
    settings = settings_in_words(cfg, task)
    page = render_page(title, settings, summaries, groups, samples, lambda place: task.rows[task.kept[place]]["prompt"])
    text = json.dumps(blank({"responses": task.state, "reward": task.reward, "summary": summaries}), indent=2)
    write_atomically(output.with_suffix(".html"), blank(page).encode())
    write_atomically(output.with_suffix(".json"), f"{text}\n".encode())
    write_output(output, task.table, groups)
    return summary_table(summaries, width=shutil.get_terminal_size().columns)


def settings_in_words(cfg: EvalScriptConfig, task: EvalTask) -> dict[str, Any]:
    """What the page says of how the responses came about; of responses that a file held, little is known."""
    reward = cfg.reward.path or ("built in, by data source" if task.needs_reward else "the environments'")
    known = {"data": ", ".join(cfg.data.files), "reward": reward}
    if cfg.score_only:
        return {"responses": "of the data file", **known}
    rollout, state = cfg.rollout, task.state
    return {
        "model": f"{cfg.model.path} ({state['--model.dtype']}, fingerprint {state['model']})",
        **({"adapter": cfg.lora.path} if cfg.lora.path else {}),
        **known,
        **({"reward": "none"} if cfg.generate_only else {}),
        "responses per prompt": rollout.n,
        "temperature": f"{rollout.temperature:g}" + (" (greedy)" if rollout.temperature == 0 else ""),
        "top-p, top-k": f"{rollout.top_p:g}, {rollout.top_k or 'all tokens'}",
        "seed": cfg.seed,
        "longest prompt": f"{cfg.data.max_prompt_len} tokens",
        "longest response": f"{rollout.max_response_len} tokens",
        **({"stop strings": ", ".join(map(repr, rollout.stop))} if rollout.stop else {}),
        **({"turns": task.turns.in_words.removeprefix("turns: ")} if task.turns else {}),
        **({"date in the prompts": state["date"]} if "date" in state else {}),
    }


if __name__ == "__main__":
    if any(word.partition("=")[0] == "--compare" for word in sys.argv[1:]):
        compare_runs(parse_cli(CompareConfig()))
    else:
        main(parse_cli(EvalScriptConfig()))
