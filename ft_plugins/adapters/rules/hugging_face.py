"""Rules over Hugging Face's libraries: a Trainer's arguments, and what it, its loaders, or a loop over accelerate show.
Pure."""

from __future__ import annotations

from .rule import Rule, built, equals, on

OTHERWISE = "run without protection"
_LOMO = ("lomo", "adalomo")
_PERSISTENT = "dataloader_persistent_workers"
_NO_SEED = "they draw no seed for the next pass, new ones after a restart do"

PERSISTENT = Rule(  # for a check alone: of a Trainer that runs, the loader of training says it
    "worker processes that outlive a pass", (_PERSISTENT,), on(_PERSISTENT), _NO_SEED, f"--{_PERSISTENT}"
)

HUGGING_FACE = (
    Rule(
        "a batch size that is looked for", ("auto_find_batch_size",), on("auto_find_batch_size"),
        "it begins training again", "--auto_find_batch_size",
    ),
    Rule(
        "LOMO", ("optim",), equals("optim", *_LOMO), "it updates in the backward", "--optim", ", ".join(_LOMO),
    ),
    built(
        "persistent", f"worker processes that outlive a pass ({_PERSISTENT})", _NO_SEED, remedy="leave it out",
    ),
    built(
        "stateful", "a loader that keeps its position itself", "it would be restored twice",
        remedy="leave out use_stateful_dataloader",
    ),
    Rule(
        "a sampled data set that rank 0 reads for all", ("built.dispatched",), on("built.dispatched"),
        "other ranks do not know their position", "--accelerator_config", "dispatch_batches",
    ),
    built(
        "unprepared", "data that accelerate has not prepared", "their position is unknown",
        remedy="return accelerator.prepare(loader) from get_train_dataloader",
    ),
    built(
        "dropped", "a get_batch_samples that drops or repeats batches", "the position is unknown",
        remedy="return every batch that it reads, once",
    ),
    built(
        "skipped", "skip_first_batches", "the position of this loader is captured, and was not restored",
        remedy="begin at engine.global_steps, where the loader continues by itself",
    ),
    built(
        "shape", "a Trainer of another version", "its loop cannot be entered", remedy="use transformers 5.24",
    ),
    built("own_loop", "a training loop of the script's own Trainer", "it is unknown", remedy="leave it to Trainer"),
    built("search", "a hyperparameter search", "it trains several times", remedy="train once in a job"),
    built(
        "trained", "a second training (Trainer.train was called twice)", "a job protects one",
        remedy="train once, or start the second as a job of its own (--ftp-job) with what the first has trained",
    ),
    built(
        "devices", "torch's DataParallel", "a process computes on several GPUs", remedy="start a process per GPU",
    ),
    built(
        "parallelism", "parallelism_config (tensor, context or sequence parallelism of accelerate)",
        "its layout is untested",
    ),
    built("sharded", "a model that transformers has sharded when it loaded it", "its layout is untested"),
    built(
        "trainer", "a Trainer", "it gathers losses and numbers of tokens over all ranks in each update",
        remedy="drop --sync-policy", systems=("sync",),
    ),
    built("trainer", "a Trainer", "it has no pipeline", remedy="give --reft in place of --baft", systems=("baft",)),
)  # fmt: skip
