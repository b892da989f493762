"""On a GPU: the fast paths beside the slow ones, as JSON.

python -m tests.gpu.worker update|engine MODEL OUT
"""

import itertools
import json
import sys
from dataclasses import replace
from functools import partial

import torch
import vllm

import lib.engine.fast.attention_splits
import lib.engine.fast.gumbel
import lib.model.optim
from lib.algorithms.advantages import GroupAdvantage
from lib.algorithms.aggregation import aggregate
from lib.algorithms.correction import CORRECTIONS
from lib.algorithms.losses import ClipLoss
from lib.algorithms.step_metrics import mismatch_metrics, update_metrics
from lib.dist import SINGLE, init_distributed, shutdown_distributed
from lib.engine.engine import RolloutEngine
from lib.engine.fast.decode_loop import TokenIds
from lib.engine.fast.paths import PATHS, FastPaths
from lib.engine.rollout_config import RolloutConfig, Sampling
from lib.engine.weight_sync import WeightSync
from lib.errors import Stopped, UserError
from lib.model.batching import iter_micro_batches, make_batch
from lib.model.forward import forward_policy
from lib.model.fsdp import FSDPConfig, begin_micro_batch, load_policy
from lib.model.networks import ModelConfig
from lib.model.optim import HostAdamW
from lib.tracking.metrics import Metrics
from lib.types import Rollout, Score
from tests.rollout_worker import SAMPLES, TEMPERATURE, generate, summary
from tests.tiny import make_rollouts

SAMPLING = Sampling(n=4, max_response_len=240, temperature=TEMPERATURE, log_probs=True)


def backward(policy, batch, *, rows, metrics):
    """One micro-batch of the loop in train_grpo.py."""
    begin_micro_batch(policy, last=True)
    log_probs, entropy = forward_policy(policy, batch, temperature=0.9)
    batch = CORRECTIONS["auto"]().weigh(log_probs, batch.to(log_probs.device), metrics)
    token_loss, stats = ClipLoss()(log_probs, batch)
    token_loss = ClipLoss().weigh(token_loss, batch)
    terms = {"pg_loss": aggregate(token_loss, batch.response_mask, "token-mean") / rows}
    terms["entropy_loss"] = aggregate(entropy, batch.response_mask, "token-mean") / rows
    loss = terms["pg_loss"] - 0.01 * terms["entropy_loss"]
    loss.backward()
    update_metrics(metrics, batch.response_mask, terms={**terms, "loss": loss}, stats=stats, num_updates=1)
    mismatch_metrics(log_probs, batch, metrics)


def gradients(policy, batch):
    policy.zero_grad()
    backward(policy, batch, rows=len(batch), metrics=Metrics(SINGLE))
    return {name: p.grad.to_local().double().cpu() for name, p in policy.named_parameters()}


def error(ours, expected):
    difference = sum(float((ours[name] - expected[name]).square().sum()) for name in expected)
    return (difference / sum(float(t.square().sum()) for t in expected.values())) ** 0.5


def make(num_groups, world):
    batch = make_batch(make_rollouts(num_groups=num_groups, max_len=60), SINGLE, mini_batch_size=num_groups * 3)
    advantages, returns = GroupAdvantage()(batch, SINGLE)
    [micro_batch] = iter_micro_batches(batch.with_(advantages=advantages, returns=returns), 100_000, world)
    return micro_batch


def of_the_update(path, world):
    """Compiled against eager layers, both against float32; graphs; no wait for the GPU within a micro-batch."""
    batch, found = make(6, world), {}
    policy = load_policy(ModelConfig(dtype="bfloat16", gradient_checkpointing=False), path, FSDPConfig(), world)
    counted = torch._dynamo.utils.counters["stats"]["unique_graphs"]  # of what a pass keeps
    compiled = gradients(policy, batch)
    found["graphs"] = []
    for num_groups in (2, 3, 40, 4, 5, 8):
        gradients(policy, make(num_groups, world))
        found["graphs"].append(torch._dynamo.utils.counters["stats"]["unique_graphs"] - counted)
    with torch.compiler.set_stance("force_eager"):
        eager = gradients(policy, batch)
    torch.set_float32_matmul_precision("highest")
    exact = load_policy(ModelConfig(dtype="float32", gradient_checkpointing=False), path, FSDPConfig(), world)
    expected = gradients(exact, batch)
    found["compiled error"], found["eager error"] = error(compiled, expected), error(eager, expected)

    metrics = Metrics(world)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")  # raises where the host waits for the GPU
    try:
        backward(policy, batch, rows=len(batch), metrics=metrics)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    found["metrics"] = len(metrics.reduce())

    large = make(300, world)
    for _ in range(2):
        backward(policy, large, rows=len(large), metrics=metrics)
    torch.cuda.synchronize()
    torch.cuda._sleep(4 * 10**9)  # about 2 s of the GPU's time
    ended = torch.cuda.Event()
    ended.record()
    backward(policy, large, rows=len(large), metrics=metrics)
    found["ahead of the GPU"] = not ended.query()
    return found


def of_the_optimizer():
    """Whether moments on the host give AdamW's weights bit for bit, over several chunks."""
    lib.model.optim.MOMENT_ELEMENTS = 1000
    generator = torch.Generator("cuda").manual_seed(0)
    sizes = ((700,), (30, 20), (5000,), (1,), (0,), (400,))
    start = [torch.randn(size, device="cuda", generator=generator) for size in sizes]
    both = [[p.clone().requires_grad_() for p in start] for _ in range(2)]
    settings = dict(lr=0.1, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1, fused=True)
    optimizers = [HostAdamW(both[0], **settings), torch.optim.AdamW(both[1], **settings)]
    same = []
    for step in range(4):
        for ours, plain in zip(*both, strict=True):
            ours.grad = plain.grad = torch.randn(ours.shape, device="cuda", generator=generator)
        if step == 2:
            both[0][1].grad = both[1][1].grad = None  # a parameter without a gradient is left alone
        for optimizer in optimizers:
            optimizer.step()
        same.append(all(torch.equal(ours, plain) for ours, plain in zip(*both, strict=True)))
    moments = [optimizers[0].state[p]["exp_avg"] for p in both[0]]
    return {"same": same, "locked": optimizers[0]._memory.is_locked, "at": str(moments[0].device)}


def count_calls(owner, name):
    """A list that the results of a function fill from now on."""
    function, results = getattr(owner, name), []

    def counting(*arguments, **named):
        results.append(function(*arguments, **named))
        return results[-1]

    setattr(owner, name, counting)
    return results


def of_the_engine(path, world):
    """Short cuts against vLLM's scheduler as it is, under preemption and prefix hits; both ways of syncing."""
    lib.engine.fast.attention_splits.FULL_WAVES = 0.2  # from some number of sequences on no splits, as in a large batch
    vllm.LLM = partial(vllm.LLM, num_gpu_blocks_override=150)  # 40 responses of 240 tokens want 600 blocks of 16
    engine = RolloutEngine(
        RolloutConfig(max_response_len=240, max_num_batched_tokens=2048, gpu_memory_utilization=0.3), path,
        dtype="bfloat16", max_prompt_len=16, most_responses=40, stop_token_ids=[11], world=world, seed=5,
    )  # fmt: skip
    engine.sleep()
    policy, found = load_policy(ModelConfig(dtype="bfloat16"), path, FSDPConfig(), world), {}
    try:
        engine.wake("kv_cache", reserved_bytes=torch.cuda.mem_get_info()[0])
    except UserError as error:
        found["no room"] = str(error)
    weight_sync = WeightSync(policy, engine, fsdp=FSDPConfig())
    engine.wake("weights")
    weight_sync.load()
    found["loaded"] = weight_sync.verify()
    found["copied"] = []
    for _ in range(2):
        with torch.no_grad():
            for parameter in [*engine.parameters().values(), *policy.parameters()]:
                parameter.mul_(-1)
            engine.parameters()["model.norm.weight"].zero_()
        weight_sync.copy()
        found["copied"].append(weight_sync.verify())
    engine.wake("kv_cache")
    scheduler = engine._engine.engine_core.engine_core.scheduler
    found["scheduler"] = type(scheduler).__name__
    preempt, count = type(scheduler)._preempt_request, []
    type(scheduler)._preempt_request = lambda self, *a, **k: (count.append(1), preempt(self, *a, **k))[1]
    from vllm.v1.attention.backends.flash_attn import FlashAttentionMetadataBuilder
    from vllm.v1.worker.gpu.sample import sampler

    races, builds = count_calls(lib.engine.fast.gumbel, "race"), count_calls(FlashAttentionMetadataBuilder, "build")
    plain, results = sampler.gumbel_sample, {}
    found["warnings"], usual_paths = engine.warnings, engine._fast_paths
    other_paths = FastPaths("auto", world, paths=tuple(path for path in PATHS if path.name != "decode loop"))
    for name, paths in {"short cuts": usual_paths, "plain": other_paths}.items():
        engine._fast_paths = paths
        engine._llm.reset_prefix_cache()
        count.clear()
        rounds = [generate(engine, SAMPLES, world, n=4, max_response_len=240) for _ in range(2)]
        results[name] = [(summary(rollouts), [r.rollout_log_probs for r in rollouts]) for rollouts in rounds]
        found[f"{name}: preempted"] = len(count)
    found["races"], found["vLLM's sampler is back"] = len(races), sampler.gumbel_sample is plain
    found["splits"] = sorted({metadata.max_num_splits for metadata in builds})
    found["short cuts change nothing"] = results["short cuts"] == results["plain"]
    found["longest"] = max(len(ids) for _, _, ids, _ in results["plain"][0][0])
    engine._fast_paths = usual_paths

    def hand_over():
        """The GPU to the trainer and back, as between two steps."""
        engine.sleep()
        engine.wake("weights")
        weight_sync.copy()
        weight_sync.verify()
        engine.wake("kv_cache")

    hand_over()
    found["partial"] = of_partial_rollouts(engine, policy, hand_over)
    rounds = [generate(engine, SAMPLES, world, n=4, max_response_len=240) for _ in range(2)]
    undisturbed = [(summary(rollouts), [r.rollout_log_probs for r in rollouts]) for rollouts in rounds]
    hand_over()
    polls = itertools.count()
    try:
        list(engine.generate(SAMPLES, SAMPLING, stop=lambda: next(polls) > 5))
    except Stopped as stopped:
        found["stopped"] = str(stopped)
    hand_over()  # sleep refuses an engine in which requests are alive
    rounds = [generate(engine, SAMPLES, world, n=4, max_response_len=240) for _ in range(2)]
    again = [(summary(rollouts), [r.rollout_log_probs for r in rollouts]) for rollouts in rounds]
    found["a stop changes nothing"] = again == undisturbed
    sleeps = []
    for spare_bytes in (0, 2**60):
        engine.decide_to_stay(spare_bytes)
        sleeps.append(engine.sleeps)
    engine.sleep()
    found["sleeps"], found["verified after staying"] = sleeps, weight_sync.verify()
    found["partial, stayed"] = of_partial_rollouts(engine, policy, hand_over)
    hand_over()
    rounds = [generate(engine, SAMPLES, world, n=4, max_response_len=240) for _ in range(2)]
    stayed = [(summary(rollouts), [r.rollout_log_probs for r in rollouts]) for rollouts in rounds]
    found["staying changes nothing"] = stayed == undisturbed
    return found


def of_partial_rollouts(engine, policy, hand_over):
    """Responses of many lengths, half of them a step, under preemption: what each call gave, and the trainer's opinion
    of the log-probs on either side of the seams."""
    engine._stop_token_ids = TokenIds(range(5, 4096, 60))
    waiting = [
        Rollout(sample=sample, index=index, response_ids=[], rollout_log_probs=[], finish_reason="unfinished")
        for sample in SAMPLES
        for index in range(4)
    ]
    ended, calls, kept = [], [], True
    while waiting:
        before = {(r.sample.uid, r.index): r for r in waiting}
        after = list(engine.generate_partly(waiting, SAMPLING, share=0.5, max_continued=3))
        for r in after:
            old = before.pop((r.sample.uid, r.index))
            num_old = len(old.response_ids)
            kept &= r.response_ids[:num_old] == old.response_ids
            kept &= r.rollout_log_probs[:num_old] == old.rollout_log_probs
        assert not before
        ended += [r for r in after if r.finish_reason != "unfinished"]
        calls.append([len(waiting), sum(r.finish_reason != "unfinished" for r in after)])
        waiting = [
            replace(r, num_stale=len(r.response_ids), num_continued=r.num_continued + bool(r.response_ids))
            for r in after
            if r.finish_reason == "unfinished"
        ]
        hand_over()
    scored = [replace(r, score=Score(score=0.0)) for r in sorted(ended, key=lambda r: (r.sample.uid, r.index))]
    batch = make_batch(scored, SINGLE, mini_batch_size=len(scored))
    with torch.no_grad():
        log_probs, _ = forward_policy(policy, batch, temperature=TEMPERATURE)
    ours, theirs = log_probs.cpu(), batch.rollout_log_probs

    def difference(rows):
        return float((ours - theirs)[rows][batch.response_mask[rows]].abs().mean())

    seams = torch.tensor([r.num_continued > 0 for r in scored])
    return {
        "calls": calls,
        "kept": kept,
        "lengths": [len(r.response_ids) for r in scored],
        "most continued": max(r.num_continued for r in scored),
        "difference with seams": difference(seams),
        "difference without": difference(~seams),
        "difference one token off": float((ours[:, 1:] - theirs[:, :-1])[batch.response_mask[:, 1:]].abs().mean()),
    }


def main(part, path, out):
    world = init_distributed()
    if part == "update":
        found = {"update": of_the_update(path, world), "optimizer": of_the_optimizer()}
    else:
        found = of_the_engine(path, world)
    with open(out, "w") as file:
        json.dump(found, file, indent=1)
    shutdown_distributed()


if __name__ == "__main__":
    main(*sys.argv[1:])
