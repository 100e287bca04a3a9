"""The parts of gpu_queue.py in their order: what each runs, what rehearses it, how long it may take, what it answers.

A command is a script beside this file, or `-m MODULE`, with options; `A && B` are processes that run side by side. In
braces: {out} is the part's folder, {queue} the folder of all parts, {minutes} what the part may still use, {model} and
{data} what the command line names, and {peers} where vLLM and TRL are.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Part:
    """A measurement: what is run on a GPU, what rehearses it on a CPU, and how long the first may take."""

    name: str
    command: str
    tiny: str
    minutes: float
    answers: str = ""  # the issue, and what of it
    modules: tuple[str, ...] = ()  # of this Python that are not installed everywhere
    peers: tuple[str, ...] = ()  # of the peers' Python
    after: str = ""  # the part whose model it starts from
    makes: str = ""  # a file of a model that others start from
    least: float | None = None  # minutes that are worth beginning; None: all of them
    shares: bool = False  # has several processes on the device
    finished: tuple[int, ...] = (0,)  # exit statuses of a measurement; tests that fail are one, too


SETS = "--set run.diagnose 1 --set learn.minibatches 1"
SMALL = "--device cpu --rows 4 --prompts 2 --group 2 --new 12 --budget 16 --interval 8 --repeats 1"
STAY = 24  # minutes of a part that needs a whole stay

# ------------------------------------------------------------------------------------------ tests

PYTEST = "-m pytest -n {n} --dist worksteal -m 'not slow' -rf --junitxml {{out}}/tests.xml"
TESTS = tuple(
    Part(
        name, f"{PYTEST.format(n=12)} {folder}", f"{PYTEST.format(n=0)} {rehearsed}", minutes, answers,
        modules=("pytest", "xdist"), finished=(0, 1),
    )
    for name, folder, rehearsed, minutes, answers in (
        ("gpu-tests", "tests/gpu", "tests/gpu/test_gpu_packing.py", 12, "19-28: tests on a device, failures by name"),
        ("kernel-tests", "tests/kernels", "tests/kernels/test_ops.py", 12, "22, 27: kernels against their twins"),
    )
)  # fmt: skip

# ------------------------------------------------------------------------------------------ SmolLM2, issue 19

# As the blocks that were run, so that their seeds can be compared; two fit into a stay of 26 minutes.
BLOCK = "smollm2.py block --model {model} --out {out} --keep {out}/kept --prompts 32 --enough 0.25"
SHORT = "--minutes 12.2 --warmup-minutes 2.5 --evaluate-minutes 2"
LONG_BLOCK = "--minutes 23"
WARMED = {
    "countdown": "--task countdown --warm-steps 80,20,20",
    "stories": "--task stories --warm-steps 35,10,10,10,10,10",
}
TINY_BLOCK = (
    "smollm2.py block --model tiny:1x64 --out {out} --keep {out}/kept --interval 8 --warm-steps 2 --steps 2 "
    "--processes 2 --prompts 2 --group-size 2 --problems 2 --samples 1 --eval-rows 4 --micro-batch-tokens 2048 "
    f"--set model.dtype float32 --set rollout.max_new_tokens 60 --set eval.prompts 2 --set warmup.batch 2 "
    f"--set warmup.workers 0 {SETS}"
)
COUNTDOWN = f"{TINY_BLOCK} --task countdown --budgets 64 --methods none,shadow"
TRANSFER = f"{TINY_BLOCK} --task countdown --budgets 64 --methods shadow,snapkv:shadow"
STORIES = f"{TINY_BLOCK} --task stories --evict-prompt --budgets 32 --methods sparse-rl"
NOTES = f"{TINY_BLOCK} --task notes --evict-prompt --budgets 64 --methods shadow --option forget_given 1"
GSM8K = f"{TINY_BLOCK} --task gsm8k --data {{data}} --budgets 64 --methods shadow --set task.template plain"
BLOCKS = tuple(
    Part(f"smollm2-{name}", f"{BLOCK} {SHORT} {WARMED[task]} {more}", tiny, 12.9, answers)
    for name, task, more, tiny, answers in (
        ("countdown-1-80", "countdown", "--seed 1 --budgets 80", COUNTDOWN, "19.3: second seed, countdown, 80"),
        ("stories-1-192", "stories", "--seed 1 --budgets 192", STORIES, "19.3: second seed, stories, 192"),
        ("countdown-0-128", "countdown", "--seed 0 --budgets 128", COUNTDOWN, "19.3: second seed, countdown, 128"),
        ("stories-0-224", "stories", "--seed 0 --budgets 224", STORIES, "19.3: stories, the milder budget"),
        ("stories-1-224", "stories", "--seed 1 --budgets 224", STORIES, "19.3: stories, the milder budget, seed 1"),
        (
            "transfer", "countdown", "--seed 0 --budgets 80 --methods "
            "dense,sparse-rl,shadow,snapkv:sparse-rl,snapkv:shadow", TRANSFER,
            "19.3: SnapKV; trained x deployed: dense, R-KV, SnapKV",
        ),
        (
            "tis-smd", "countdown", "--seed 0 --budgets 80 --methods dense,tis,smd,smd-forward,shadow", COUNTDOWN,
            "19.3: tis; smd in directions a and b",
        ),
        ("countdown-0-192", "countdown", "--seed 0 --budgets 192", COUNTDOWN, "19.3: the harmless budget"),
        (
            "evict-prompt", "countdown", "--seed 0 --budgets 80 --methods dense,none,sparse-rl,shadow --evict-prompt",
            COUNTDOWN, "19.7: an unprotected prompt",
        ),
        (
            "released", "countdown", "--seed 1 --budgets 128 --methods "
            "dense,sparse-rl,sparse-rl-released,released-cap,released-mask,released-weights", COUNTDOWN,
            "19.5: which part of the released form collapses",
        ),
    )
) + tuple(
    Part(f"smollm2-{name}", f"{BLOCK} {LONG_BLOCK} {more}", tiny, STAY, answers)
    for name, more, tiny, answers in (
        (
            "gsm8k", "--task gsm8k --seed 0 --budgets 96 --data {data} --warm-steps 350,350,350 --warmup-minutes 7",
            GSM8K, "19.4: GSM8K from the best of three rounds of warm-up",
        ),
        (
            "notes", "--task notes --seed 0 --budgets 256 --interval 32 --prompts 16 --option forget_given 1 "
            "--methods dense,sparse-rl,shadow", NOTES, "25: the look-up task on a tenth of its slots",
        ),
    )
)  # fmt: skip
TINY_WARM = TINY_BLOCK.replace("smollm2.py block", "smollm2.py warmup")
WARM_STARTS = tuple(
    Part(
        f"smollm2-warm-{task}", f"smollm2.py warmup --task {task} --model {{model}} --out {{out}} --minutes 7",
        f"{TINY_WARM} --task {task}", 8, f"19, 27: SmolLM2's warm start, {task}", makes=f"{task}-0/warm/config.json",
    )
    for task in ("countdown", "stories")
)  # fmt: skip
SMOLLM2_NOISE = tuple(
    Part(
        f"noise-smollm2-{budget}", "gradient_noise.py smollm2-countdown "
        "--model {queue}/smollm2-warm-countdown/countdown-0/warm "
        f"--batches 24 --budgets {budget} --methods none,sparse-rl,sparse-rl-released,shadow --out {{out}} "
        "--minutes {minutes}",
        "gradient_noise.py smollm2-countdown --model {queue}/smollm2-warm-countdown/countdown-0/warm --batches 2 "
        "--budgets 64 --methods sparse-rl,shadow --out {out} --set rollout.max_new_tokens 40 "
        "--set rollout.prompts 2 --set rollout.group_size 2 --set rollout.rows 4", 14,
        f"19.5: noise of the gradient on SmolLM2, {budget} slots", after="smollm2-warm-countdown",
    )
    for budget in (80, 128)
)  # fmt: skip

# ------------------------------------------------------------------------------------------ steps, issue 22

STEPS = "step_peers.py --out {out} --models {queue}/models --columns "
TINY_STEPS = "step_peers.py --tiny --out {out} --models {queue}/models --columns "
BOTH = "sparse-rl,shadow"
LARGE = "--set learn.micro_batch_tokens 65536 --set learn.packing"
QLORA = "training_step.py --recipe qwen2.5-7b-gsm8k-24gb --data {data}/train/gsm8k.jsonl --steps 1 --out {out}"
LONG = "long_learner.py --gpu-memory 80 --out {out}"
TINY_LONG = (
    "long_learner.py --out {out} --model tiny:2x64 --device cpu --prompt 16 --budget 24 --interval 8 --sampled 16 "
)
WHOLE_STEPS = (
    Part("steps", STEPS + BOTH, TINY_STEPS + BOTH, 6, "22: whole steps, both presets"),
    Part(
        "steps-65536", f"{STEPS}{BOTH} {LARGE} always", f"{TINY_STEPS}shadow {LARGE} always", 6,
        "22: the same with 65,536 tokens in packed micro-batches",
    ),
    Part(
        "steps-unpacked", f"{STEPS}{BOTH} {LARGE} never", f"{TINY_STEPS}shadow {LARGE} never", 7,
        "22.3: the same without packing",
    ),
    Part(
        "step-peers", f"{STEPS}sparse-rl,shadow,trl-vllm,trl-sparse {{peers}}", TINY_STEPS + "sparse-rl,trl-sparse",
        17, "22.8: TRL with vLLM, and with our rollouts, beside ours", peers=("trl", "datasets", "vllm"),
    ),
    Part(
        "trl-sparse", f"{STEPS}trl-sparse,trl-replay {{peers}}", TINY_STEPS + "trl-sparse,trl-replay", 9,
        "22.8: TRL with our rollouts", peers=("trl", "datasets"),
    ),
)  # fmt: skip
LEARNER = (
    Part("learner", "learner_gpu.py --out {out} --quick --ways modules,fused", "learner_gpu.py --out {out} --quick "
         "--ways modules,fused --model tiny --device cpu", 3, "22.2: fused layers, idle share"),
    Part("learner-65536", "learner_gpu.py --out {out} --tokens 65536 --ways modules,fused", "learner_gpu.py "
         "--out {out} --model tiny --device cpu --ways modules,fused", 6, "22: share of 800 TFLOP/s at 65,536 tokens"),
    Part("first-step", "first_step.py --out {out} --models {queue}/models", "first_step.py --out {out} --models "
         "{queue}/models --tiny", 4, "22.6: first steps"),
    Part("half", "half_precision.py random:qwen2.5-1.5b --out {out}/half.json", "half_precision.py tiny:2x64 "
         f"--out {{out}}/half.json {SMALL}", 5, "22.7: float16 beside bfloat16"),
    Part("long", f"{LONG} --lengths 65536 --views shadow", f"{TINY_LONG} --lengths 96 --views shadow", 6,
         "22.5: 7B LoRA, 64k tokens of a response, 80 GB"),
    Part("long-others", f"{LONG} --lengths 16384,32768,131072 --views shadow", f"{TINY_LONG} --lengths 96,160 "
         "--views shadow", 10, "22.5: 16k, 32k and 128k tokens"),
    Part("long-dense", f"{LONG} --lengths 65536 --views dense", f"{TINY_LONG} --lengths 96 --views dense", 6,
         "22.5: 64k tokens in the dense view"),
    Part("qlora-24gb", f"{QLORA} --gpu-memory 24 --characters 320", f"{QLORA} --characters 40 --model tiny:2x64 "
         "--set model.quantize null --set model.dtype float32 --set model.gradient_checkpointing true "
         "--set rollout.prompts 2 --set rollout.group_size 2 --set rollout.rows 4 --set rollout.max_new_tokens 40 "
         "--set rollout.budget 60 --set rollout.interval 8", 20,
         "22: 7B QLoRA, 4k tokens, in 24 GB", modules=("bitsandbytes",)),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ speed, issues 22 to 28

ROLLOUT, TINY_ROLLOUT = "rollout_gpu.py --only ", "rollout_gpu.py --tiny --only "
SPEED = (
    Part("conversations", "conversations_gpu.py --out {out}", "conversations_gpu.py --out {out} --tiny", 4,
         "25: conversations beside single turns"),
    Part("reading", "reading_gpu.py --out {out}", "reading_gpu.py --out {out} --tiny", 2,
         "25: prompts and given tokens by modules and by fused layers, 32 and more rows at a time"),
    Part("serve", "serve_gpu.py --out {out} --columns rollout,serve", "serve_gpu.py --out {out} --tiny "
         "--columns rollout,serve", 3, "26: 256 streams beside bench rollout", modules=("fastapi", "uvicorn")),
    Part("serve-vllm", "serve_gpu.py --out {out} --columns rollout,serve,vllm {peers}", "serve_gpu.py --out {out} "
         "--tiny --columns serve,vllm", 9, "26: beside vLLM's server", modules=("fastapi", "uvicorn"), peers=("vllm",)),
    Part("slots-kernel", f"{ROLLOUT}slots-kernel,noise --out {{out}}", "", 5, "27.5: noise and kernel of 8-bit slots"),
    Part("slots", f"{ROLLOUT}slots --out {{queue}}/slots", f"{TINY_ROLLOUT}slots --out {{queue}}/slots", 11,
         "27.5: fp8 and int8 slots, 1.5B and 7B"),
    Part("slots-vllm", f"{ROLLOUT}slots-vllm --out {{queue}}/slots {{peers}}",
         f"{TINY_ROLLOUT}slots-vllm --out {{queue}}/slots", 20, "27: vLLM with an fp8 cache", peers=("vllm",)),
    Part("speed-vllm", f"{ROLLOUT}short,goal-1.5b,speed-vllm --out {{out}} {{peers}}",
         f"{TINY_ROLLOUT}short,speed-vllm --out {{out}}", 15, "22.8: the speed table with vLLM in the same run",
         peers=("vllm",)),
    Part("new-models", "new_models_gpu.py --minutes 3.5 --lines {out}/lines.jsonl", "new_models_gpu.py --tiny "
         "--lines {out}/lines.jsonl", 15, "24: steps of four architectures"),
    Part("own-experts", "new_models_gpu.py qwen3-30b-a3b --own-experts --minutes 5 --lines {out}/lines.jsonl",
         "new_models_gpu.py qwen3-30b-a3b --own-experts --tiny --lines {out}/lines.jsonl", 6,
         "24.6: experts by our product"),
    Part("new-models-vllm", "new_models_gpu.py gemma-3-4b --vllm --minutes 5 --lines {out}/lines.jsonl {peers}",
         "new_models_gpu.py gemma-3-4b --vllm --tiny --lines {out}/lines.jsonl", 10, "24: Gemma 3 4B beside vLLM",
         peers=("vllm",)),
    Part("pool", "ahead.py --preset 1.5b --arms ahead pool --limit 210 --out {out}", "ahead.py --tiny --arms ahead "
         "pool --out {out}", 5, "28: learner and sampler on one device", modules=("ray", "math_verify")),
    Part("steps-learned", f"{STEPS}shadow --set rollout.compressor learned --set scorer.every 1",
         f"{TINY_STEPS}shadow --set rollout.compressor learned --set scorer.every 1", 5,
         "27.3: what training `learned` costs a step"),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ 4.5 M, issues 23 and 27

WARM = "{queue}/search-warm/warm"
TINY_SETS = (
    "--set model.dtype float32 --set rollout.rows 4 --set rollout.prompts 2 --set rollout.group_size 2 "
    f"--set rollout.max_new_tokens 12 --set eval.prompts 2 --set eval.samples 1 {SETS}"
)
TINY_ARMS = f"--arms --seeds 1 --processes 2 {TINY_SETS} --set run.steps 1"
TINY_WARM_UP = (
    f"--warm {TINY_SETS} --set warmup.steps 1 --set warmup.batch 2 --set warmup.workers 0 --set model.name tiny:1x64"
)


def grid(study: str, tiny_methods: str, answers: str) -> tuple[Part, ...]:
    """A study of learning_gpu.py on countdown, seed by seed in one folder."""
    here = f"learning_gpu.py --study {study} --out {{queue}}/{study} --model {WARM} --methods '{{methods}}'"
    real = f"learning_gpu.py --study {study} --out {{queue}}/{study} --model {WARM} --arms --processes 8"
    return tuple(
        Part(
            f"{study}-{seed}", f"{real} --seeds {seed + 1} --minutes {{minutes}}",
            f"{here.replace('{methods}', tiny_methods)} {TINY_ARMS}", STAY, f"{answers}, seed {seed}",
            after="search-warm", least=8, shares=True,
        )
        for seed in (0, 1)
    )  # fmt: skip


LEARNING = (
    Part(
        "search-warm", "learning_gpu.py --study algorithms --out {out} --warm --until 0.75 --minutes {minutes}",
        f"learning_gpu.py --study algorithms --out {{out}} {TINY_WARM_UP}", 10, "23, 27: the warm start of countdown",
        makes="warm/config.json", least=6,
    ),
    *grid("joint", "rkv shadow,learned shadow", "27: RL on countdown, rkv against learned"),
    *grid("algorithms", "ppo shadow,online-dpo sparse-rl", "23: GRPO, online DPO and PPO at R-KV 96"),
    *grid("distill", "shadow-to-dense-reverse 0.01", "23.5: smd, three directions x three weights"),
    *grid("checks", "rescored,dense-reference", "22.1, 23.1: no scoring under replay; a dense reference"),
    Part(
        "noise-search", f"gradient_noise.py countdown-search --model {WARM} --batches 24 --budgets 192,96 "
        "--minutes {minutes} --out {out}", f"gradient_noise.py countdown-search --model {WARM} --batches 2 "
        "--budgets 40 --methods sparse-rl,shadow --out {out} --set rollout.max_new_tokens 24 "
        "--set rollout.prompts 2 --set rollout.group_size 2 --set rollout.rows 4", 12,
        "19.5: noise of the gradient at 4.5 M", after="search-warm",
    ),
)  # fmt: skip

LONG_RECALL = "learning_gpu.py --study recall-long --out {queue}/recall-long --arms --seeds 1 --processes 4"
TINY_RECALL = "--set task.count 40 --set eval.options '{{}}'"
RECALL = (
    Part(
        "recall-long-warm", "learning_gpu.py --study recall-long --out {queue}/recall-long --warm --until 0.5 "
        "--minutes {minutes}", "learning_gpu.py --study recall-long --out {queue}/recall-long "
        f"{TINY_WARM_UP}@16384 {TINY_RECALL}", STAY, "23.5: the warm start of recall with 8,400 tokens", least=10,
        makes="../recall-long/warm/config.json",
    ),
    *(
        Part(
            f"recall-long-{name}", f"{LONG_RECALL} --minutes {{minutes}} {more}", f"learning_gpu.py --study "
            f"recall-long --out {{queue}}/recall-long {TINY_ARMS} {TINY_RECALL} --methods shadow {tiny}", STAY,
            f"23.5: prompt-only, 8,400 tokens: {answers}", after="recall-long-warm", least=10, shares=True,
        )
        for name, more, tiny, answers in (
            ("methods", "", "", "methods"),
            ("retention", "--methods shadow,sparse-rl --settings 'snapkv 256,snapkv 1024,snapkv 2048'",
             "--settings 'snapkv 256'", "how much stays"),
            ("choosers", "--methods shadow --settings 'rkv 512,knorm 512,tova 512,random 512,window 512,chunked 512'",
             "--settings 'chunked 512'", "who chooses"),
        )
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ Breadcrumbs, issue 23

FRONTIER = "frontier.py --study {study} --out {{queue}}/frontier-{study} --seed {seed} --points"
TINY_FRONTIER = (
    "frontier.py --study sums --out {queue}/frontier-tiny --seed 0 --points --prompts 2 --samples 1 "
    "--set student.chunks [4] --set run.steps 1 --set rollout.prompts 2 --set rollout.group_size 2 "
    "--set rollout.rows 4 --set eval.every 0 --set rollout.max_new_tokens 24"
)
TEACHERS = {"countdown": WARM, "linsys": "{queue}/linsys-warm/warm", "stargraph": "{queue}/stargraph-warm/warm"}
TINY_TEACHER = (
    "warm.py {task}-warmup --out {{out}}/warm --set model.name tiny:1x64 --set model.dtype float32 "
    "--set warmup.steps 1 --set warmup.batch 2 --set warmup.workers 0 --set eval.prompts 2 --set rollout.rows 2"
)


def frontier(study: str, stage: str) -> Part:
    """Two seeds side by side."""
    first = "search-warm" if study == "countdown" else f"{study}-warm"
    options, tiny, after = {
        "joint": (f"--joint {TEACHERS[study]} --patience 4", "--joint tiny-sums", first),
        "late": ("--late --patience 4", "--late", f"frontier-{study}-joint"),
        "rl": ("--rl 8 --of late", "--rl 4 --of late", f"frontier-{study}-late"),
        "cold": ("--rl 8 --of cold", "--rl 4 --of cold", f"frontier-{study}-joint"),
    }[stage]
    both = " && ".join(f"{FRONTIER.format(study=study, seed=seed)} --minutes {{minutes}} {options}" for seed in (0, 1))
    what = {"joint": "teacher and students", "late": "late students", "rl": "RL on a student's folded rollouts",
            "cold": "RL on folded rollouts from a cold start"}[stage]  # fmt: skip
    return Part(
        f"frontier-{study}-{stage}", both, f"{TINY_FRONTIER} {tiny}", STAY, f"23.6: Breadcrumbs, {study}: {what}",
        after=after, least=12, shares=True,
    )  # fmt: skip


BREADCRUMBS = (
    *(frontier("countdown", stage) for stage in ("joint", "late", "rl", "cold")),
    *(
        part
        for study, minutes in (("linsys", 12), ("stargraph", 15))
        for part in (
            Part(f"{study}-warm", f"warm.py {study}-warmup --out {{out}}/warm --minutes {{minutes}}",
                 TINY_TEACHER.format(task=study), minutes, f"23.6: the warm start of {study}",
                 makes="warm/config.json", least=5),
            *(frontier(study, stage) for stage in ("joint", "late", "rl")),
        )
    ),
    Part(
        "learned-fold", " && ".join(f"learned_fold.py --study countdown --out {{queue}}/learned-fold --seed {seed} "
                                    f"--teacher {WARM} --student --arms --minutes {{minutes}}" for seed in (0, 1)),
        "learned_fold.py --study sums --out {queue}/learned-fold --teacher tiny-sums --student --arms --only 'c = 4' "
        "--set run.steps 1",
        STAY, "23.7: learned folding against a fixed c", after="search-warm", least=12, shares=True,
    ),
)  # fmt: skip

# ------------------------------------------------------------------------------------------ compressors, issue 27

POINTS = "compressors.py --processes 8 --interval 16 --minutes {minutes}"
TINY_POINTS = (
    "compressors.py --processes 2 --seeds 1 --budgets 64 --interval 8 --new 24 --prompts 2 --offline 1 --rounds 1 "
    "--train 2 --steps 2 --rules rkv learned --no-offline"
)
COUNTDOWN_OPTIONS = '--task countdown --options \'{{"count": 3, "highest": 25, "search": 640}}\''
STORIES_OPTIONS = '--task stories --options \'{{"people": 3, "things": 2, "steps": 6, "highest": 20}}\''
COMPRESSORS = (
    *(
        Part(
            f"compressors-search-{seed}", f"{POINTS} --seeds {seed + 1} --out {{queue}}/compressors-search "
            f"--model {WARM} {COUNTDOWN_OPTIONS} --budgets 48 64 96 128 --new 640 --rows 256",
            f"{TINY_POINTS} --model {WARM} {COUNTDOWN_OPTIONS} --out {{queue}}/compressors-search", STAY,
            f"27: accuracy against entries, countdown at 4.5 M, seed {seed}", after="search-warm", least=8, shares=True,
        )
        for seed in (0, 1, 2)
    ),
    *(
        Part(
            f"compressors-smollm2-{task}", f"{POINTS} --seeds 1 --no-offline --out {{out}} --rows 128 "
            f"--model {{queue}}/smollm2-warm-{task}/{task}-0/warm {options} {sizes}",
            f"{TINY_POINTS} --out {{out}} --model {{queue}}/smollm2-warm-{task}/{task}-0/warm {options}", STAY,
            f"27: accuracy against entries, SmolLM2 on {task}", after=f"smollm2-warm-{task}", least=12, shares=True,
        )
        for task, options, sizes in (
            ("countdown", COUNTDOWN_OPTIONS, "--budgets 64 80 96 128 --new 512"),
            ("stories", STORIES_OPTIONS, "--budgets 176 192 224 256 --new 448"),
        )
    ),
)  # fmt: skip

PARTS = (
    *TESTS, *BLOCKS, *WHOLE_STEPS, *LEARNER, *SPEED, *LEARNING, *WARM_STARTS, *SMOLLM2_NOISE, *COMPRESSORS,
    *BREADCRUMBS, *RECALL,
)  # fmt: skip
