"""Sample responses to the prompts of parquet or JSONL files, score them, and say how good the model is.

One process per GPU, each with a vLLM engine; no trainer. Every line of `evaluate_model` runs on all ranks unless
it says otherwise.

    torchrun --nproc_per_node=8 eval.py --model.path DIR --data.files test.parquet --output out.parquet --rollout.n 8
    torchrun --nproc_per_node=8 eval.py --model.path runs/x --data.files test.parquet --output out.parquet
    python eval.py --score-only --data.files out.parquet --output again.parquet --reward.path my_reward.py
    python eval.py --compare runs/a runs/b --output compare.html     # no evaluation: the curves of runs on one page

out.parquet has the input's columns and rows, and per row a list with an entry for every response: `responses`,
`scores` (null: the reward function failed or declined), `predictions` (its `pred`), `finish_reasons` (stop, length),
`response_lengths` (tokens). out.json has the statistics, out.html shows them with samples. An evaluation that was
killed goes on where it was when it is started again.
"""

import json
import shutil
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from typing import Any

from lib.config import REQUIRED, parse_cli, reporting_errors
from lib.data import decode
from lib.dist import init_distributed, shutdown_distributed
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
from lib.evaluation.scores import collect_scores, submit, try_reward
from lib.launch import check_engines, check_same_config, check_same_prompts
from lib.model import ModelConfig
from lib.peers import naming_killed_ranks
from lib.rewards import RewardConfig, Scorer
from lib.secret_values import blank
from lib.tracking.terminal import Terminal
from lib.types import Sample

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
    with reporting_errors(debug=cfg.debug), naming_killed_ranks(init_distributed()):
        world = init_distributed()
        samples, scores = not cfg.score_only, not cfg.generate_only
        cfg, note = complete(cfg, argv, cfg.model.path, world, samples=samples, scores=scores)
        evaluate_model(cfg, [note] if note else [])
        shutdown_distributed()


def evaluate_model(cfg: EvalScriptConfig, notes: Sequence[str] = ()) -> None:
    """Checks the input, generates what is missing, scores, writes. `notes`: what to say first."""
    # ---- Everything that can be wrong with the input, before a model is loaded ----
    world = init_distributed()
    check_same_config(cfg, world)
    output = world.agree(lambda: check_output(cfg.output, cfg.data.files, overwrite=cfg.overwrite))
    needs_grader = cfg.reward.path is None and not cfg.generate_only
    table, rows, warnings = world.agree(
        lambda: read_input(cfg.data, with_responses=cfg.score_only, needs_grader=needs_grader)
    )
    reward_note = "reward: none"
    if not cfg.generate_only:
        reward_note = world.agree(lambda: try_reward(cfg.reward, cfg.data, rows))
    if cfg.score_only:
        groups, kept = groups_of(table), range(len(table))
        samples = [rows.sample(row, uid=row) for row in kept]
        state, logs, log = {}, None, None
    else:
        world.agree(lambda: check_engines(cfg.rollout, world))
        model = find_model(cfg.model.path, cfg.data, cfg.rollout, world, adapter_path=cfg.lora.path)
        date = world.on_rank_0(lambda: date_of(cfg.output))
        stop_ids, prompts = world.agree(lambda: load_eval_prompts(cfg.data, model, rows, date=date))
        check_same_prompts(prompts, prompts, world)
        samples, kept = prompts.all_samples(), prompts.kept
        dtype = str(cfg.model.compute_dtype(world)).removeprefix("torch.")
        state = what_defines_responses(cfg.rollout, model, prompts, stop_ids, dtype=dtype, seed=cfg.seed)

    with ExitStack() as stack:
        world.agree(lambda: stack.enter_context(only_writer(output)) if world.rank == 0 else None)
        world.agree(
            lambda: check_output(cfg.output, cfg.data.files, overwrite=cfg.overwrite)
        )  # no other process writes it now
        if not cfg.score_only:
            parts = Parts(parts_folder(output), state, world, overwrite=cfg.overwrite)
            groups, logs, log = parts.groups, parts.folder / "logs", parts.log
            warnings += [*model.warnings, *prompts.warnings]
            warnings += [f"{len(groups)} of {len(samples)} prompts are finished already"]
        terminal = stack.enter_context(Terminal(world, log))
        scorer = None
        if not cfg.generate_only:
            sources, log_path = {sample.data_source for sample in samples}, logs and logs / f"rewards_{world.rank}.log"
            scorer = stack.enter_context(closing(Scorer(cfg.reward, sources, log_path=log_path)))
            for uid in sorted(groups)[world.rank :: world.size]:  # while the engine starts
                submit(scorer, groups[uid], samples[uid])
        for note in dict.fromkeys((*notes, reward_note, *warnings)):
            terminal.say(note)

        # ---- Generate what is missing; it is scored meanwhile ----
        missing = [sample for sample in samples if sample.uid not in groups]
        if missing:
            generate(cfg, model, stop_ids, missing, parts=parts, scorer=scorer, terminal=terminal)
        scores = {} if scorer is None else collect_scores(scorer, cfg.reward, world, terminal)

        # ---- Write: all of it, then the parts are no longer needed ----
        def write() -> None:
            found = parts.read() if missing else groups
            finished = [replace(found[uid], scores=scores.get(uid)) for uid in range(len(samples))]
            summaries = summarise(finished, [sample.data_source for sample in samples])
            title = f"{cfg.model.path or 'Responses'} on {', '.join(cfg.data.files)}"
            settings = settings_in_words(cfg, state)
            page = render_page(title, settings, summaries, finished, samples, lambda place: rows[kept[place]]["prompt"])
            text = json.dumps(blank({"responses": state, "reward": reward_note, "summary": summaries}), indent=2)
            write_atomically(output.with_suffix(".html"), blank(page).encode())
            write_atomically(output.with_suffix(".json"), f"{text}\n".encode())
            write_output(output, table.take(list(kept)), finished)
            if not cfg.score_only:
                parts.delete()
            columns = shutil.get_terminal_size().columns
            terminal.say(f"{summary_table(summaries, width=columns)}\nwritten: {output}, and .json and .html beside it")

        world.agree(lambda: write() if world.rank == 0 else None)


def generate(
    cfg: EvalScriptConfig, model: EvalModel, stop_ids: list[int], samples: list[Sample], *,
    parts: Parts, scorer: Scorer | None, terminal: Terminal,
) -> None:  # fmt: skip
    """Generates the groups of these prompts into `parts`, each as soon as its last response ends."""
    world = parts.world
    dtype = str(cfg.model.compute_dtype(world)).removeprefix("torch.")
    terminal.say(f"building the engine ({dtype}); what the libraries say goes to {parts.folder}/logs/")
    engine = RolloutEngine(
        cfg.rollout, str(model.files.folder), dtype=dtype, max_prompt_len=cfg.data.max_prompt_len,
        most_responses=len(samples) * cfg.rollout.n, stop_token_ids=stop_ids, world=world, seed=cfg.seed,
    )  # fmt: skip
    for warning in engine.warnings:
        terminal.say(f"warning: {warning}")
    terminal.say(f"the engine holds the model: all {load_engine_(engine, model, world)} tensors were written")
    share, num_tokens, start = engine.share(samples), 0, time.perf_counter()
    with terminal.progress("generating", len(share)) as advance:
        for rollouts in engine.generate(share, training_sampling(cfg.rollout), stream="validation"):
            if engine.is_leader:
                group = EvalGroup(
                    uid=rollouts[0].sample.uid,
                    responses=[decode(model.tokenizer, rollout.response_ids) for rollout in rollouts],
                    finish_reasons=[rollout.finish_reason for rollout in rollouts],
                    response_lengths=[len(rollout.response_ids) for rollout in rollouts],
                )
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


def settings_in_words(cfg: EvalScriptConfig, state: Mapping[str, Any]) -> dict[str, Any]:
    """What the page says of how the responses came about; of responses that a file held, little is known."""
    known = {"data": ", ".join(cfg.data.files), "reward": cfg.reward.path or "built in, by data source"}
    if cfg.score_only:
        return {"responses": "of the data file", **known}
    rollout = cfg.rollout
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
        **({"date in the prompts": state["date"]} if "date" in state else {}),
    }


if __name__ == "__main__":
    if any(word.partition("=")[0] == "--compare" for word in sys.argv[1:]):
        compare_runs(parse_cli(CompareConfig()))
    else:
        main(parse_cli(EvalScriptConfig()))
