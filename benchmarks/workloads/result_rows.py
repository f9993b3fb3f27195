"""The rows of the table of results: what each figure is to be, how it comes about, what a run must show. Pure.

`since`: the day on which the goal was set; the rules of a row are in `results.py`.
"""

from __future__ import annotations

from workloads.layer_shapes import COLUMNS
from workloads.results import Need, ResultRow

_LOCAL, _DREAM, _QUALITY, _STALL = "local_sgd", "dreamddp", "local_sgd_quality", "snapshot_stall"
_LATER = "2026-11-28"
_GPU = (Need("on_a_device", 1.0, "needs a GPU"),)
_MEMORY_PEERS, _PEERS = ("torchsnapshot", "dlrover"), ("torchsnapshot", "dlrover", "checkfreq")
_PAIRS = (Need("pairs", 10.0, "{} pairs of at least 10"),)
_SHAPES = (Need("shapes", 5.0, "{} shapes of the paper's 5"), *_PAIRS)
_CALIBRATED = (Need("calibrated", 1.0, "waiting for an average did not cost the paper's 23%"),)
_GROUPS = (Need("groups", 5.0, "{} sizes of at least 5"),)
_ALL_COLUMNS = (Need("columns", float(len(COLUMNS)), f"{{}} columns of {len(COLUMNS)}"),)
_POLICIES = {"DiLoCo": "diloco", "Post Local SGD": "post_local_sgd"}
_PLAIN = "a plain iteration of this run is not the setting's"
_HARMED = 1.05  # of a loss: garbage that does less to a peer shows nothing

ROWS = (
    ResultRow(_STALL, "stall_x", "wait of training for a snapshot of 1 GiB under matrix products, in multiples of "
              "copying it", most=0.05,
              limit=0.0, headline=True, peers={name: f"{name}_stall_matmul_x" for name in _PEERS}),
    ResultRow(_STALL, "stall_after_load_x", "the same right after a minute of heavy load on all cores", limit=0.0,
              peers={name: f"{name}_stall_after_load_x" for name in _PEERS}),
    ResultRow(_STALL, "committed_x", "a snapshot with its digests under matrix products, in multiples of "
              "copying it; DLRover takes no digests, and stops training", most=1.5, limit=1.0,
              peers={name: f"{name}_committed_matmul_x" for name in _MEMORY_PEERS}),
    *(ResultRow(_STALL, f"step_slowdown_{load}_x", f"a step {of} that captures, less one that does not, in the same",
                peers={name: f"{name}_step_slowdown_{load}_x" for name in _PEERS})
      for load, of in (("matmul", "of matrix products"), ("adam", "over memory"), ("host_bound", "of small calls"))),
    *(ResultRow(_STALL, f"over_{peer}_{end}_x", f"speed of saving to {end} over {name}, one rank", least=1.0,
                spread=True, needs=_PAIRS, paper=paper, since=_LATER)
      for peer, end, name, paper in (("torchsnapshot", "memory", "TorchSnapshot's", "14.1 (24 replicas)"),
                                     ("dlrover", "memory", "DLRover's, which takes no digests", ""),
                                     ("torchsnapshot", "storage", "TorchSnapshot's", ""),
                                     ("checkfreq", "storage", "that of CheckFreq's way, rebuilt here", "106 (to "
              "memory, over to storage)"))),
    *(ResultRow(_STALL, f"step_{step}_x", f"a snapshot {meaning}, nothing else to do, in the same", paper="by a curve",
                needs=(Need("step_samples", 10.0, "{} samples of at least 10"),))
      for step, meaning in (("memory", "to shared memory"), ("storage", "from there to storage"))),
    ResultRow("gpu_snapshot", "1gib_registered_x", "copies from a device to a segment, in multiples of pinned memory",
              least=0.9, limit=1.0, needs=_GPU),
    ResultRow("gpu_snapshot", "slowdown", "cost of a snapshot after every step of a GPT that keeps the device busy",
              most=0.01, limit=0.0, share=True, needs=_GPU),
    ResultRow("double_capture", "double_worst", "processor time of capture with parity of replicas, over capture "
              "without, worst of 2 to 16 nodes", most=2.5, needs=_GROUPS),
    ResultRow("double_capture", "sent_worst", "of a share of 512 MiB with 64 KiB of small state, what then is "
              "sent to other nodes, worst of 2 to 16 nodes",
              most=0.01, share=True, how="computed", needs=_GROUPS),
    ResultRow("double_capture", "weak_scaling", "speed of capture without parity with 16 replicas over one, of "
              "16 times; a share measured alone, in processor time",
              least=0.78, limit=1.0, paper="78% (24 replicas)", share=True,
              how="computed",
              needs=_GROUPS, since=_LATER),
    ResultRow("double_capture", "strong_scaling", "the same with 8 stages over one, of 8 times; a stage measured alone",
              least=0.78, limit=1.0, paper="by a curve", share=True, how="computed", needs=_GROUPS, since=_LATER),
    ResultRow("ledger_cost", "per_second", "of an iteration of 1 s, what the ledger of inputs takes", most=0.001,
              share=True, how="computed"),
    ResultRow("watch_cost", "share", "of a second, what metrics, events and scalars of a rank take, at an "
              "iteration a second and a scrape every 15 s", most=0.001, share=True, how="computed"),
    ResultRow("parity", "encode_x", "RAIM5 encoding, in multiples of an XOR in place; processor time of a thread, "
              "worst group", least=0.9),
    ResultRow("parity", "decode_x", "RAIM5 decoding with all digests verified, in the same", least=0.7),
    ResultRow("parity", "double_encode_x", "RAIM6 encoding, in the same", least=0.8),
    ResultRow("parity", "double_decode_x", "RAIM6 decoding of two lost nodes, in the same", least=0.7),
    ResultRow("recovery", "load_x_loopback", "bytes read a second to rebuild a lost node's share, in multiples of a "
              "loopback socket, median of 3", least=0.5, limit=1.0, how="emulated"),
    ResultRow("recovery", "two_load_x_loopback", "of two lost nodes at once, in the same, one failure", least=0.4,
              limit=1.0, how="emulated"),
    ResultRow("recovery", "lost_iterations", "iterations lost, most of 5 failures, each within 3 s of a commit; "
              "iterations of 3 s", most=2, limit=0.0, headline=True, how="emulated"),
    ResultRow("recovery", "megatron_recovery_seconds", "s from a kill to the iteration it came in, Megatron, 8 ranks, "
              "median of 3", peers={"torchrun, a checkpoint every 24 "
              "iterations": "megatron_own_checkpoint_recovery_seconds"}, most=5.0, headline=True),
    ResultRow("recovery", "deepspeed_recovery_seconds", "the same, DeepSpeed",
              peers={"torchrun, a checkpoint every 24 iterations": "deepspeed_own_checkpoint_recovery_seconds"},
              most=5.0),
    ResultRow("recovery", "megatron_restart_seconds", "s from a kill until the last completed iteration was computed "
              "again, to be compared, Megatron"),
    ResultRow("recovery", "recovery_x", "from a kill to its iteration under torchrun, a checkpoint every 24, over "
              "ours; the worse framework", least=5.0,
              needs=(Need("deepspeed_recovery_seconds", 0.0, "needs DeepSpeed"),)),
    *(ResultRow("recovery", f"{framework}_{figure}", f"{meaning}, {title}", how=how)  # type: ignore[arg-type]
      for framework, title in (("megatron", "Megatron"), ("deepspeed", "DeepSpeed"))
      for figure, meaning, how in (
          ("recovery_x_saving_5_percent", "the same with checkpoints as often as 5% of the time permits, half an "
           "interval lost", "computed"),
          ("restart_x", "from a kill to any iteration's end under torchrun, lost ones not counted, over ours",
           "measured"))),
    ResultRow("recovery", "spare_seconds", "s from the loss of one of two nodes to the next iteration's end, a warm "
              "spare waits, Megatron, median of 3"),
    ResultRow("bubble_overhead", "overhead_worst", "cost of copies in bubbles, upper end of its interval, worst of 5 "
              "shapes", most=0.01, limit=0.0, peers={"a copy in every iteration, at "
              "once": "unplanned_overhead_worst"}, share=True,
              headline=True, how="emulated", needs=_SHAPES),
    ResultRow("bubble_overhead", "in_bubble_share", "of copied bytes, those that arrived in their bubble", least=0.9,
              limit=1.0, share=True, how="emulated", needs=_SHAPES),
    ResultRow("bubble_overhead", "filled_share", "of planned windows, what was filled", least=0.95, limit=1.0,
              share=True, how="emulated", needs=_SHAPES),
    ResultRow("bubble_overhead", "iterations_per_checkpoint_worst", "iterations between two copies of the state of "
              "mixed precision, 12 bytes a parameter", limit=1.0, how="emulated", needs=_SHAPES),
    ResultRow("bubble_overhead", "iterations_parameters_only_worst", "planned for 2 bytes a parameter, weights in "
              "bf16 alone", most=3.0, limit=1.0, paper="1 to 3", how="computed", needs=_SHAPES),
    *(ResultRow("bubble_overhead", f"{how}_{figure}", f"{meaning} {under}", most=most, share=share, how="emulated",
                needs=(Need(f"{how}_pairs", 10.0, "{} pairs of at least 10"),), since=since)
      for how, under in (("slow", "on links that carry a tenth after the first plan, one shape"),
                         ("jitter", "where a stage's passes take up to 30% more or less, one shape"),
                         ("drift", "where a stage gets 1.5 times as slow, one shape"))
      for figure, meaning, most, share, since in (("overhead", "the cost, upper end,", 0.01, True, "2026-11-29"),
                                                  ("iterations", "iterations between two copies", None, False, ""))),
    ResultRow("simulate", "plan_seconds", "processor s to plan 64 stages with 512 microbatches, 1f1b, 1 GB a "
              "rank", most=1.0),
    ResultRow("simulate", "plan_slowest_seconds", "the same with the schedule that takes longest"),
    ResultRow("simulate", "analytic_error_worst", "error of simulated bubbles against closed forms", most=1e-9,
              limit=0.0, how="simulated"),
    ResultRow("simulate", "bubble_share_least", "bubbles and waits for links of the stage with fewest, the "
              "paper's shapes with GPT-2, assumed speeds",
              least=0.2, paper="20%", share=True, how="simulated", since=_LATER),
    ResultRow("simulate", "bert_bubble_share_least", "the same with its two BERT models",
              least=0.2, paper="20%",
              share=True, how="simulated", since=_LATER),
    ResultRow("simulate", "bert_iterations_reserved_middle", "iterations between two copies of 4 bytes a parameter, "
              "BERT, pairs of stages, median (more, where none fits), with the reserve of its Algorithm 1",
              most=3.0, paper="1 to 3", how="simulated", since=_LATER),
    ResultRow("simulate", "bert_iterations_middle", "the same without that reserve", how="simulated"),
    ResultRow("simulate", "chimera_of_1f1b", "bubbles with Chimera's schedule over those with 1f1b, 16 stages",
              most=1.0, paper="below 1, by a curve", how="simulated", since=_LATER),
    ResultRow("sync_overhead", "paft_dyn_of_sync", "cost of averaging in the background, over waiting for it, 4 "
              "ranks", most=0.5,
              limit=0.0, paper="0.51 (32 workers)", how="emulated", needs=_CALIBRATED),
    *(ResultRow("sync_overhead", f"paft_dyn_of_sync_{ranks}", f"the same, {ranks} ranks, one round", most=1.0,
                limit=0.0, paper=paper, how="emulated", needs=_CALIBRATED, since=_LATER)
      for ranks, paper in ((8, "0.76"), (16, "0.52"), (32, "0.51"))),
    ResultRow("sync_overhead", "audit_10", "of an iteration of 150 ms with 1 MiB of state, an audit after every "
              "tenth", most=0.005, share=True, spread=True,
              how="emulated"),
    ResultRow("sdc", "order_holds", "corrupted gradients: six rules of the paper's order hold, within a point of "
              "accuracy", least=True, paper="yes"),
    ResultRow("sdc", "audit_identical", "one replica of 4 is corrupted, and audited after each update: the run ends as "
              "the clean one, bit for bit", least=True),
    ResultRow("sdc", "sigma_error", "error of the estimated noise with SGD, one seed", most=0.05, limit=0.0,
              share=True),
    ResultRow("sdc", "divergence_error", "squared divergence, sigma^2 up to 1: error of the corrected Lemma 3.1, one "
              "seed",
              most=0.05, limit=0.0, paper="of the form of Lemma 3.1", share=True, since=_LATER),
    ResultRow("sdc", "digits_state_gain", "a small ResNet, sigma^2 1e-2: points of accuracy that averaging optimizer "
              "state adds", paper="few, by a curve"),
    ResultRow("sdc", "text_state_gain", "the same, of a loss, with a GPT", paper="few, by a curve"),
    ResultRow(_LOCAL, "edit_stall_x", "stall of a synchronisation, EDiT over Post Local SGD", most=0.125,
              limit="edit_stall_x_bound", paper="0.12", how="emulated",
              needs=(Need("even_calibrated", 1.0, _PLAIN),)),
    ResultRow(_LOCAL, "a_edit_straggler_x", "one replica of 8 always lags: A-EDiT over plain", least=1.8,
              limit="a_edit_straggler_x_bound", paper="1.92", how="emulated",
              needs=(Need("consistent_calibrated", 1.0, _PLAIN),)),
    ResultRow(_LOCAL, "edit_random_straggler_x", "a random one lags: EDiT over plain", least=1.7,
              limit="edit_random_straggler_x_bound", paper="1.82", how="emulated",
              needs=(Need("random_calibrated", 1.0, _PLAIN),)),
    ResultRow(_LOCAL, "edit_traffic_x", "40 times the traffic: EDiT over plain, one round", least=2.7,
              limit="edit_traffic_x_bound", paper="2.78", how="emulated",
              needs=(Need("traffic_calibrated", 1.0, _PLAIN),)),
    *(ResultRow(_LOCAL, f"{policy}_{kind}_{degree}_x", f"{meaning.format(degree)} over plain, one round",
                least=0.93 * paper,
                limit=f"{policy}_{kind}_{degree}_x_bound", paper=f"{paper:.3g}", how="emulated", since=_LATER,
                needs=(Need(f"{kind}_{degree}_calibrated", 1.0, _PLAIN),))
      for policy, kind, meaning, gains in (
          ("a_edit", "consistent", "one always lags {} of 4.75 s: A-EDiT", {1.5: 1.314, 2.5: 1.517, 3.5: 1.721}),
          ("edit", "random", "a random one lags {} of 4.75 s: EDiT", {1.5: 1.302, 2.5: 1.462, 3.5: 1.637}),
          ("edit", "traffic", "{} times the traffic: EDiT", {10: 1.141, 20: 1.729, 30: 2.251}))
      for degree, paper in gains.items()),
    ResultRow(_LOCAL, "edit_bytes", "bytes per parameter that EDiT holds, in replicas of one rank", most=9.0,
              peers={"Post Local SGD": "post_local_sgd_bytes", "DiLoCo": "diloco_bytes", "like CO2": "co2_like_bytes"},
              paper="of sizes that fit only", since=_LATER),
    *(ResultRow(_QUALITY, f"{learner}_{figure}", f"{title}: {meaning}", most=most, needs=needs,
                peers={name: f"{learner}_{figure.replace('edit', policy)}" for name, policy in _POLICIES.items()})
      for learner, title in (("noisy_digits", "digits"), ("text", "GPT"))
      for figure, meaning, most, needs in (
          ("edit_loss_x", "loss of EDiT over that of plain training", 1.01, ()),
          ("edit_garbage_x", "final loss with one of 4 replicas fed garbage for a while over without", 1.02,
           (Need(f"{learner}_diloco_garbage_x", _HARMED, "this garbage does not harm DiLoCo ({})"),)))),
    *(ResultRow(_QUALITY, f"noisy_digits_edit_without_{part}_{figure}", f"digits: {meaning}, EDiT without {what}",
                peers={"EDiT": f"noisy_digits_edit_{figure}"}, paper="worse than EDiT, by a curve")
      for part, what in (("elimination", "anomaly elimination"), ("weighting", "weighted averages"),
                         ("clipping", "clipping"), ("all", "all three"))
      for figure, meaning in (("loss_x", "loss over that of plain training"),
                              ("garbage_x", "garbage on one of 4 replicas"))),
    *(ResultRow(_QUALITY, f"{learner}_{prefix}edit_low_rate_loss_x",
                f"{title}: loss of EDiT at a quarter of the inner rate over plain{more}, one seed", most=1.01,
                paper="below 1",
                since=_LATER)
      for learner, title in (("noisy_digits", "digits"),
                             ("text", "GPT, tau times that rate 0.05 (paper: 0.02 to 0.08)"))
      for prefix, more in (("", ""), ("longer_", ", 4 times as many iterations"))),
    *(ResultRow(_QUALITY, f"{learner}_edit_best_rate_x", f"{title}: best inner rate of EDiT with 8 replicas over that "
                "with 2, of rates a factor 2 apart, one seed", least=1.0, most=1.0,
                peers={"plain": f"{learner}_plain_best_rate_x"},
                paper="1 (plain: more)", since=_LATER)
      for learner, title in (("noisy_digits", "digits"), ("text", "GPT"))),
    *(ResultRow(_QUALITY, f"noisy_digits_{way}_x", f"digits: loss of EDiT over plain, {numbers} replicas, one seed",
                most=1.0,
                paper="perplexity " + paper, since=_LATER)
      for way, numbers, paper in (("growing", "2, 4, then 8", "4.5% lower"),
                                  ("shrinking", "8, 4, then 2", "2.6% lower"))),
    ResultRow(_DREAM, "over_overlapped_x", "DreamDDP over overlapped data parallelism (the faster of DDP and of "
              "ASC-WFBP as the paper has it), least of all "
              f"{len(COLUMNS)} columns", least=1.73, paper="1.73 to 5.22", headline=True, how="emulated",
              needs=_ALL_COLUMNS),
    ResultRow(_DREAM, "over_asc_x", "over reductions of several layers at a time, as ASC-WFBP has them, least",
              least=1.73, paper="1.73 to 5.22", how="emulated", needs=_ALL_COLUMNS, since=_LATER),
    ResultRow(_DREAM, "over_full_x", "over local SGD that waits, least", least=1.16, paper="1.16 to 1.50",
              how="emulated", needs=_ALL_COLUMNS),
    ResultRow(_DREAM, "over_enp_x", "over equal numbers of layers, least", least=1.02, paper="1.02 to 1.24",
              how="emulated", needs=_ALL_COLUMNS),
    ResultRow(_DREAM, "search_planned_x", "planned period over the best of contiguous sets, by brute force; median",
              most=1.0, peers={"the paper's search": "search_paper_search_x", "equal": "search_equal_x"},
              paper="1 to slightly more", how="computed", since=_LATER),
    ResultRow(_DREAM, "search_planned_200_seconds", "s to plan 200 layers, H 5", most=1.0,
              peers={"the paper's search": "search_paper_search_200_seconds"}, since=_LATER),
    ResultRow(_DREAM, "h5_planned_x_most", "planned iteration with H 5 over that with 10, most of all columns",
              how="computed", needs=_ALL_COLUMNS),
    ResultRow(_DREAM, "real_x", "a real job on slow links, over DistributedDataParallel", least=1.0, spread=True,
              needs=(Need("real_rounds", 3.0, "{} rounds of at least 3"),)),
    *(ResultRow("dreamddp_quality", f"{learner}_loss_x", f"{title}: loss of DreamDDP over that of local SGD", most=1.01)
      for learner, title in (("deep_noisy_digits", "digits"), ("deep_text", "GPT"))),
    *(ResultRow("dreamddp_quality", f"deep_noisy_digits_{figure}", f"digits, 4 replicas of a small network: {meaning}",
                most=most, paper=paper, since=_LATER)
      for figure, meaning, most, paper in (
          ("iterations_x", "iterations to the loss of local SGD and 1% more, over its", None, ""),
          ("divergence_x", "divergence of partial over full synchronisation", 1.0, "below 1"),
          ("peak_divergence_x", "the same, where it is largest in a period", 1.0, "below 1"),
          ("h2_loss_x", "loss with H 2 over that with H 5", 1.0, "below 1"))),
    ResultRow("dreamddp_quality", "deep_noisy_digits_time_x", "digits: time to the loss of local SGD over its, by the "
              "emulated gain of an iteration", most=1.0, paper="0.64 to 0.84", how="computed", since=_LATER),
    ResultRow("scale", "plans_4096_seconds", "processor s for all plans of the last of 4,096 ranks, worst of 3 "
              "shapes", most=10.0),
    ResultRow("scale", "ranks_4096_store_operations", "of a rank of 4,096, operations of the store at start, without "
              "polls, mean", most=20,
              how="emulated"),
    ResultRow("scale", "lead_512_form_seconds", "s until 512 nodes have formed a round, one run", most=3.0,
              how="emulated"),
    ResultRow("scale", "lead_512_waiting_share", "of a processor, the lead while 512 nodes wait", most=0.05, share=True,
              how="emulated"),
    ResultRow("scale", "smps_2048_share", "of a processor, the busiest of 2,048 SMPs, the tree alone, 2 iterations "
              "of 5.1 s", most=0.1, share=True,
              how="emulated"),
    ResultRow("scale", "node_2048_sockets", "sockets of protection, of a node of 2,048", most=64, how="computed"),
)  # fmt: skip
