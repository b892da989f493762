"""TRL's GRPOTrainer on a run of ours: the same model, prompts in the same order, settings and validation.

    pip install trl==1.16.0 datasets==5.2.0                     # beside requirements.txt; tested with vllm 0.26.0
    torchrun --nproc_per_node=1 -m recipes.grpo_smollm2_words --run-dir runs/ours
    python -m recipes.peers.trl_smollm2_words --like runs/ours --out runs/trl

Everything is read from our run's config.json. OUT/metrics.jsonl has our names where they mean the same, and
`train_seconds`: wall-clock seconds in steps so far, without loading and validation (ours: the sum of timing_s/step).
What TRL does by itself is left as it is: padded micro-batches, its fused head, weights sent tensor by tensor to vLLM.
"""

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lib.config import REQUIRED, parse_cli, reporting_errors
from lib.data import (
    DataConfig,
    Prompts,
    PromptStream,
    check_data_files,
    decode,
    load_tokenizer,
    stop_token_ids,
    tokenize,
)
from lib.engine import request_seed
from lib.errors import UserError
from lib.rewards.last_number import compute_score
from lib.rollouts.validation_metrics import validation_metrics
from lib.types import Sample


@dataclass(frozen=True, kw_only=True)
class PeerConfig:
    """Which run of ours to repeat, and where to write."""

    like: str = REQUIRED
    """Folder of our run; its config.json has the settings."""
    out: str = REQUIRED
    """Folder for metrics.jsonl and samples."""
    num_steps: int | None = None
    """Training steps; None: as many as ours."""
    seed: int | None = None
    """Seed of the data order and of sampling; None: ours."""
    micro_batch_size: int = 128
    """Responses in one forward or backward pass; TRL pads them to the longest."""


def settings_of(ours: dict[str, Any], cfg: PeerConfig) -> dict[str, Any]:
    """GRPOConfig's arguments that make TRL do what a run of ours does."""
    rollout, optim = ours["rollout"], ours["optim"]
    responses = ours["prompts_per_step"] * rollout["n"]
    algorithm = ours["loss"]["name"], ours["advantage"]["name"], ours["loss_agg_mode"], ours["mini_batch_size"]
    if algorithm != ("ClipLoss", "GroupAdvantage", None, responses) or ours["data"]["curriculum"]:
        raise UserError(
            f"a run that this script does not repeat; --like {cfg.like}; found another loss or advantage than GRPO's, "
            "several updates a step, or a curriculum; expected one of grpo_smollm2_words"
        )
    return dict(
        # One optimizer step on the responses of one rollout: n of each prompt, all of them in one mini-batch.
        num_generations=rollout["n"],
        per_device_train_batch_size=cfg.micro_batch_size,
        gradient_accumulation_steps=responses // cfg.micro_batch_size,
        max_steps=cfg.num_steps or ours["num_steps"],
        shuffle_dataset=False,  # the rows come in the order of our stream
        # The loss: clipped ratio, every token of the mini-batch weighs alike, no KL.
        loss_type="dapo",  # our token-mean
        epsilon=ours["loss"]["clip_low"],
        epsilon_high=ours["loss"]["clip_high"],
        beta=0.0,
        scale_rewards="group",  # standard deviation of the group, plus 1e-4 (ours: plus 1e-6)
        # The engine's log-probs against the trainer's: weights of tokens, cut at the same bound.
        vllm_importance_sampling_correction=True,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_max=ours["correction"]["is_threshold"],
        # AdamW. TRL leaves norms out of the weight decay; at these rates that is nothing.
        learning_rate=optim["lr"],
        lr_scheduler_type="constant",
        adam_beta1=optim["betas"][0],
        adam_beta2=optim["betas"][1],
        adam_epsilon=optim["eps"],
        weight_decay=optim["weight_decay"],
        max_grad_norm=optim["clip_grad"],
        # Precision: float32 master weights and bfloat16 compute, as ours; the engine in bfloat16.
        bf16=True,
        gradient_checkpointing=False,  # a model of this size keeps its activations, as ours does
        # Sampling, in a vLLM engine of the same process that keeps its memory, as ours does for a small model.
        temperature=rollout["temperature"],
        max_completion_length=rollout["max_response_len"],
        use_vllm=True,
        vllm_mode="colocate",
        vllm_gpu_memory_utilization=rollout["gpu_memory_utilization"],
        vllm_max_model_length=ours["data"]["max_prompt_len"] + rollout["max_response_len"],
        seed=ours["seed"] if cfg.seed is None else cfg.seed,
        output_dir=cfg.out,
        logging_steps=1,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
    )


def load_prompts(ours: dict[str, Any], tokenizer: Any) -> tuple[Prompts, list[Sample]]:
    """The training prompts and all validation samples, by our own code."""
    lists = ("train_files", "val_files")
    data = DataConfig(**{name: tuple(it) if name in lists else it for name, it in ours["data"].items()})
    files = check_data_files(data)
    train, val = (tokenize(data, files, tokenizer, split=split) for split in ("train", "val"))
    return train, val.all_samples()


def reward(completions: list[str], ground_truth: list[str], **_: Any) -> list[float]:
    """Our grader, for TRL."""
    return [compute_score("", text, truth, {})["score"] for text, truth in zip(completions, ground_truth, strict=True)]


def validate(engine: Any, samples: list[Sample], ours: dict[str, Any], tokenizer: Any, seed: int) -> tuple[dict, list]:
    """Our validation metrics and the rows of samples, with TRL's engine and our seeds."""
    from vllm import SamplingParams

    values: dict[str, float] = {}
    rows = []
    stops = stop_token_ids(tokenizer, ours["model"]["path"])
    for temperature, n in ((ours["eval"]["temperature"], ours["eval"]["n"]), (0.0, 1)):
        params = [
            SamplingParams(
                n=n, temperature=temperature, max_tokens=ours["rollout"]["max_response_len"], stop_token_ids=stops,
                seed=request_seed(seed, sample.uid, stream="validation"),
            )
            for sample in samples
        ]  # fmt: skip
        prompts = [{"prompt_token_ids": list(map(int, sample.prompt_ids))} for sample in samples]
        scored = []
        for sample, output in zip(samples, engine.generate(prompts, params, use_tqdm=False), strict=True):
            for response in output.outputs:
                text = decode(tokenizer, list(response.token_ids))
                result = compute_score(sample.data_source, text, sample.ground_truth, sample.extra_info)
                scored.append((sample.data_source, sample.uid, {"acc": result["acc"], "reward": result["score"]}))
                rows.append({"data_source": sample.data_source, "prompt": tokenizer.decode(sample.prompt_ids),
                             "response": text, "ground_truth": sample.ground_truth, "score": result["score"],
                             "temperature": temperature, "finish_reason": response.finish_reason})  # fmt: skip
        found = validation_metrics(scored, largest=n)
        values |= found if temperature else {f"{k.removesuffix('mean@1')}greedy": v for k, v in found.items()}
    return values, rows


def make_callback(out: Path, ours: dict[str, Any], samples: list[Sample], tokenizer: Any, seed: int) -> Any:
    """A callback that writes OUT/metrics.jsonl and keeps the clock of the steps; `trainer` is set before it is used."""
    import torch
    from transformers import TrainerCallback

    class Recorder(TrainerCallback):
        trainer: Any = None
        seconds, since = 0.0, 0.0

        def now(self) -> float:
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            return time.perf_counter()

        def validate(self, step: int) -> dict[str, float]:
            start = self.now()
            generation = self.trainer.vllm_generation
            generation.sync_weights()
            values, rows = validate(generation.llm, samples, ours, tokenizer, seed)
            folder = out / "samples"
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"step_{step}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
            return values | {"timing_s/testing": self.now() - start}

        def write(self, row: dict[str, Any]) -> None:
            with (out / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(row) + "\n")
            core = {k.removeprefix("val-core/"): round(v, 3) for k, v in row.items() if k.startswith("val-core")}
            print(f"step {row['step']} | {row['train_seconds']:.1f} s | {core or row.get('reward')}", flush=True)

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            self.write({"step": 0, "train_seconds": 0.0} | self.validate(0))
            self.since = self.now()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step_s = self.now() - self.since
            self.seconds += step_s
            every, step = ours["eval"]["every"], state.global_step
            due = step == state.max_steps or (every > 0 and step % every == 0)
            self.measured = (self.validate(step) if due else {}) | {"timing_s/step": step_s}
            self.since = self.now()

        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
            if "reward" in logs:
                logs = {name: value for name, value in logs.items() if isinstance(value, int | float)}
                self.write({"step": state.global_step, "train_seconds": self.seconds} | self.measured | logs)

    return Recorder()


def run(cfg: PeerConfig) -> None:
    """Trains as the run in `cfg.like` did, with TRL."""
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    out = Path(cfg.out)
    if (out / "metrics.jsonl").exists():
        raise UserError(f"there is a run already; --out {out}; found metrics.jsonl, expected none; give another folder")
    out.mkdir(parents=True, exist_ok=True)
    ours = json.loads((Path(cfg.like) / "config.json").read_text())
    args = GRPOConfig(**settings_of(ours, cfg), use_cpu=not torch.cuda.is_available())
    path = ours["model"]["path"]
    tokenizer = load_tokenizer(path)
    train, samples = load_prompts(ours, tokenizer)
    stream = PromptStream(train, seed=args.seed, shuffle=ours["data"]["shuffle"])
    drawn = stream.next(args.max_steps * ours["prompts_per_step"])
    rows = [{"prompt": tokenizer.decode(s.prompt_ids), "ground_truth": s.ground_truth} for s in drawn]
    assert tokenizer(rows[0]["prompt"])["input_ids"] == list(drawn[0].prompt_ids), "the text of a prompt has other ids"
    recorder = make_callback(out, ours, samples, tokenizer, args.seed)
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32), reward_funcs=reward, args=args,
        train_dataset=Dataset.from_list(rows), processing_class=tokenizer, callbacks=[recorder],
    )  # fmt: skip
    recorder.trainer = trainer
    trainer.train()


if __name__ == "__main__":
    with reporting_errors():
        run(parse_cli(PeerConfig()))
