"""Ideas of other tools that lmtrain lacks or has in another form, found by the words within a name: freeze_layers and
unfreeze_last_n are one idea.

Asked for a name that no table of names has (foreign_names.py, names_without_counterpart.py), when no setting or option
is spelled like it. A sentence says plainly what there is not, and the nearest that there is.
"""

from __future__ import annotations

import re

# sentence -> words that a name of the idea has: "a+b" are both needed; the first idea that fits counts
IDEAS = {
    "checkpoint.keep_best=1 keeps the best checkpoint, by checkpoint.best_by.":
        "best+only save+best monitor best+metric best+checkpoint",
    "checkpoint.ema.decay=0.999 keeps an average of the weights, and `lmtrain merge RUN --last N --output DIR` "
    "averages checkpoints.":
        "swa averaging weight+average weights+average lawa polyak",
    "A decoder predicts the next token, and an encoder, one of BERT's models on data of the kind masked, what is "
    "masked; there is no other objective.":
        "objective mlm whole+word nsp loss+fn causal span+corruption ul2",
    "Widths are scaled by hand; there is no maximal update parametrization.": "mup mutransfer",
    "A run saves a checkpoint when it is stopped by a signal, by Ctrl-C or by a file STOP in run.dir.":
        "save+exit save+interrupt save+signal checkpoint+exit sigterm preemption",
    "train.steps=5 makes a trial of a few steps, and --dry-run checks everything without a step.":
        "overfit fast+dev smoke+test limit+train trial dev+run sanity+check test+run",
    "A model's size follows from its layers and widths: `lmtrain config list model` lists the models.":
        "n+params num+params num+parameters model+params target+params",
    "Nothing is frozen here; all weights are trained.":
        "freeze frozen freezing unfreeze unfrozen trainable",
    "There is no adapter here; all weights are trained.":
        "lora qlora dora adapter adapters peft galore bitfit",
    "Models are not fine-tuned here, on chats, preferences or pairs; `lmtrain export RUN --to hf --output DIR` writes "
    "a model for tools that do, and checkpoint.init_from=FOLDER goes on pretraining one.":
        "finetuning finetune sft dpo ppo grpo rlhf instruct instruction chat conversation conversations template "
        "alpaca sharegpt reward preference role roles",
    "No model learns from another here.":
        "teacher distill distillation student",
    "A run begins with random weights, unless checkpoint.init_from=FOLDER gives others.":
        "scratch pretrained random+init base+model warm+start",
    "Documents are always joined and cut to samples of model.seq_len tokens, none of which is lost; data.packing and "
    "data.document_mask say how.":
        "packing pack packed pad+to pad+sequence padding truncation truncate truncating drop+long group+texts "
        "concat+examples concatenate chunk+length chunking multipack excess+length overlap",
    "A run validates after every train.valid_interval_steps steps and in the end, not before the first; `lmtrain eval "
    "CHECKPOINT --task perplexity --data FILE` measures any checkpoint.":
        "eval+start eval+first eval+begin eval+beginning eval+initial validate+start validate+first sanity+val "
        "num+sanity sanity+steps val+first evaluate+before eval+step+0 eval+before",
    "Saving, validating and logging count steps: checkpoint.interval_steps, train.valid_interval_steps, "
    "observe.log_interval_steps. --dry-run shows how many steps an epoch has.":
        "per+epoch every+epoch n+epoch each+epoch epoch+interval epochs+interval every+epochs n+epochs epoch+freq "
        "epoch+end end+epoch after+epoch",
    "A run ends with train.steps or train.tokens, or by run.time_limit; there is no early stopping, and a file STOP "
    "in run.dir ends a run. checkpoint.keep_best=1 keeps the best checkpoint.":
        "early+stop early+stopping patience plateau min+delta target+loss stop+loss stop+when loss+threshold",
    "A run resumes where its run.dir stopped, by itself.":
        "resume resuming resumable restart+auto auto+load",
    "A checkpoint holds all that a run needs to go on; `lmtrain export RUN --to hf --output DIR` writes the weights "
    "alone.":
        "save+only save+optimizer save+optim save+weights save+model save+state save+full weights+only model+only "
        "save+safetensors save+hf save+huggingface save+scheduler save+merged consolidated save+last save+final "
        "save+16bit gather+16bit export+hf hf+export",
    "checkpoint.keep_last says how many of the newest checkpoints stay, checkpoint.keep_every_steps and "
    "checkpoint.keep_best which others.":
        "keep+checkpoints keep+ckpt delete+checkpoints remove+checkpoints delete+old cleanup+checkpoint "
        "top+checkpoints max+checkpoints save+top overwrite+checkpoint prune+checkpoints save+best keep+n best+model",
    "The size of the vocabulary follows from the tokenizer, and a model with another begins anew; "
    "model.vocab_multiple pads it.":
        "resize vocab+size vocab+pad vocab+padding extend+vocab expand+vocab new+tokens",
    "The tokenizer's file has its special tokens; `lmtrain preprocess --tokenizer FOLDER` takes one of transformers "
    "with tokens of your own.":
        "special+token special+tokens add+tokens added+tokens additional+tokens pad+token eos+token bos+token "
        "unk+token add+eos add+bos eos+id pad+id bos+id append+eos",
    "Weights are never kept in 16 bits alone; precision=bf16 computes in bf16 beside weights in fp32.":
        "pure+bf16 full+bf16 bf16+full pure+fp16 pure+half bf16+master bf16+params param+dtype master+weights "
        "weights+dtype optimizer+dtype stochastic+rounding kahan bf16+optimizer state+dtype",
    "There is no float8 nor quantization here; precision=bf16 is the fastest.":
        "8bit 4bit int8 int4 nf4 quantize quantization quantized bnb bitsandbytes fp8 fp4 gptq awq qat",
    "One learning rate holds for all weights.":
        "layerwise llrd embedding+lr embeddings+lr head+lr lr+mult lr+multiplier lr+scale lr+groups param+groups "
        "lr+ratio unembedding+lr matrix+lr scalar+lr lr+layer layer+lr bias+lr",
    "Weights decay; biases, norms and other vectors do not.":
        "no+decay decay+bias decay+norm decay+embedding decay+embeddings decay+exclude exclude+decay decay+filter "
        "decay+norm decay+mask",
    "The learning rate has no finder here; `lmtrain pretrain -m optim.lr=1e-4,3e-4,1e-3` tries several, and `lmtrain "
    "runs list` compares them.":
        "lr+find lr+finder find+lr lr+range lr+search search+lr hparam+search hyperparameter+search n+trials tune "
        "optuna",
    "`lmtrain pretrain --dry-run` predicts a run's memory, and `lmtrain plan` finds a layout and train.micro_batch "
    "that fit; nothing is tried out until it fits.":
        "auto+batch batch+finder scale+batch find+batch max+batch+find estimate+memory memory+estimate estimate+vram "
        "dry+memory oom autotune autotuning memory+budget memory+limit max+memory",
    "The schedules are constant, cosine, inverse_sqrt, linear and wsd, without restarts or steps; "
    "stages.NAME.schedule gives parts of a run one of their own.":
        "gamma cycles restarts cycle+length step+size milestones lr+steps lr+power power decay+factor cycle+momentum "
        "t+mult t+0 cosine+restarts num+restarts onecycle pct+start div+factor lr+milestones lr+decay+rate",
    "`lmtrain report RUN` draws the curves of a run, and `lmtrain runs plot RUN` draws them in the terminal.":
        "plot plots plotting graph chart curve curves visualize visualise dashboard",
    "The kernels are chosen for the machine.":
        "flash sdpa xformers fused kernel kernels cudnn benchmark liger triton unsloth cuda+graphs jit attn+backend "
        "attention+backend",
    "Metrics go to metrics.jsonl of run.dir, to TensorBoard and, with observe.wandb=online, to Weights & Biases "
    "alone.":
        "wandb mlflow comet neptune clearml aim swanlab trackio dvclive tracker trackers tracking csv+log csv+logger "
        "log+csv json+log log+file log+to logger logging jsonl+logger",
    "Nothing is sent when a run ends; under Slurm, --sbatch=--mail-type=END,FAIL and --sbatch=--mail-user=ADDRESS of "
    "`lmtrain slurm submit` ask Slurm for it.":
        "email mail notify notification notifications slack webhook alert alerts discord telegram callback+url",
    "A training run generates no text; `lmtrain generate` does, from any checkpoint.":
        "generate generation sample+prompts sample+prompt sample+every sample+interval sample+text prompt prompts "
        "generations sampling+interval predict+generate",
    "CUDA_VISIBLE_DEVICES=0,1 before `lmtrain` chooses the GPUs, and --nproc how many processes start.":
        "gpu+id gpu+ids device+ids gpu+index device+map cuda+device cuda+devices which+gpu visible+devices "
        "include+gpus gpu+list devices+list",
    "Under Slurm, `lmtrain slurm submit` starts all nodes; without it torchrun does, once on each node: `torchrun "
    "--nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29500 --no-python lmtrain pretrain ...`":
        "hostfile hosts host ssh mpi mpirun torchrun torchelastic rdzv accelerate launcher pdsh machine+rank "
        "master+port machines main+process nnodes num+machines ray cluster+config",
    "There is no offloading to the host here; parallel.zero and recompute save memory.":
        "offload offloading nvme cpu+adam paged swap+optimizer",
    "Datasets are read from the disk as they are needed, and nothing of them is loaded or cached beforehand.":
        "streaming stream cache+dir cached cache caching prefetch pin+memory persistent+workers num+workers "
        "dataloader+workers shuffle+buffer buffer+size in+memory mmap map+batch preload",
    "Paths are those of this machine's disks; nothing is fetched from or sent to a bucket or a hub.":
        "s3 gcs gs bucket remote hub hf+token upload repo+id push azure hdfs cloud object+store",
    "data.split=[98,2] cuts off the end of a dataset for validation, `lmtrain data split` makes datasets of parts, "
    "and `lmtrain eval` measures on another.":
        "test+split test+size test+data test+file test+dataset holdout held+out eval+split dev+split train+split "
        "eval+ratio eval+fraction test+ratio val+ratio valid+ratio dev+size eval+size test+fraction",
    "Each batch has all datasets mixed by their weights, with data=blend; stages.NAME.data gives parts of a run data "
    "of their own.":
        "curriculum mixture interleave interleaving interleave+probs mix+strategy sampling+weights dataset+weights "
        "data+mix mixing proportions dataset+probs doremi",
    "All tokens count alike in the loss; with data.document_mask=true the first of a document is not predicted from "
    "the one before.":
        "loss+mask loss+weight loss+weights train+inputs ignore+index mask+prompt mask+inputs completion+only focal "
        "loss+type loss+function label+mask response+only class+weights",
    "The seed decides the first weights, the order of the samples and dropout: train.seed.":
        "seed seeds seeding",
    "Dropout is model.dropout, the same in all parts of a block.":
        "dropout droppath stochastic+depth layerdrop",
    "There is no such noise nor augmentation here.":
        "noise neftune augment augmentation mixup cutout perturb",
    "There is no mixture of experts here.":
        "moe expert experts router routing aux+loss",
    "Positions are model.positions=learned or rotary.":
        "alibi sinusoidal xpos t5+bias relative+position nope",
    "A run stops with exit code 86 at the first loss that is not finite, before it changes a weight.":
        "nan inf nonfinite detect+anomaly anomaly skip+nan spike loss+spike",
    "The gradient's norm is measured at every step, and observe.histograms_every_steps=N writes histograms.":
        "log+grad log+gradient log+gradients grad+norm+log watch+model histogram histograms log+weights log+params "
        "track+grad log+norm",
    "The samples that a run has read are known to it, and none is read twice; data.first_sample=N begins later.":
        "skip+batches skip+first skip+samples skip+steps skip+data data+offset start+sample consumed+samples",
    "The order of the samples is a permutation of each epoch, decided by train.seed.":
        "shuffle shuffling shuffled sampler sequential+data no+shuffle reshuffle bucket+length length+bucketing",
    "Progress is shown in the terminal, in log.txt of run.dir, and by `lmtrain watch RUN`.":
        "progress tqdm verbose verbosity quiet silent debug log+level rich+progress",
    "run.time_limit=12h ends a run after so much time, with a checkpoint.":
        "time+limit max+hours max+minutes max+seconds wall+time walltime max+time timeout+hours train+time",
    "--max-restarts N starts a run again that loses a process; under Slurm the job starts itself again.":
        "retry retries max+retries auto+restart restarts+max fault+tolerant fault+tolerance elastic+training",
    "compute.deterministic=true refuses kernels whose result can differ.":
        "reproducible reproducibility deterministic",
    "observe.profile_steps=[FIRST,LAST] writes torch's profile of these steps, and `lmtrain trace RUN` shows where "
    "the time of a step went.":
        "profile profiling profiler nsys nsight trace+steps flamegraph",
    "model.window, model.rotary_scaling and stages.NAME.model.seq_len are for longer sequences; learned positions "
    "cannot grow.":
        "long+context extend+context context+extension longlora sliding ring+attention ulysses",
    "A run trains one model on text; there are no images, sound or labels.":
        "image images vision video audio speech classification labels label num+classes multimodal",
    "parallel.dp_shard=N shares the work among N processes, parallel.zero says what else they share, and --nproc N "
    "starts them.":
        "strategy ddp fsdp fsdp2 deepspeed distributed horovod",
}  # fmt: skip
_WORD = re.compile(r"[a-z]+|\d+[a-z]*")


def idea_of(name: str) -> str | None:
    """Return the sentence on the idea that another tool's name stands for, by the words in it; None if none fits."""
    spelt = name.lower().replace("-", "_").replace(".", "_")
    words = {word for part in spelt.split("_") for word in (part, *_WORD.findall(part))}
    return next(
        (
            sentence for sentence, patterns in IDEAS.items()
            if any(words.issuperset(pattern.split("+")) for pattern in patterns.split())
        ), None,
    )  # fmt: skip
