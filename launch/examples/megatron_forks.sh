#!/usr/bin/env bash
# Trains a small GPT with Megatron-DeepSpeed or gpt-neox under ft-run, on two processes of this machine's CPU.
#
#     launch/examples/megatron_forks.sh CHECKOUT DATA [FLAGS]   CHECKOUT: of either; DATA: prefix of tokenized data
#
# FLAGS are ft-run's and are added to --reft. On GPUs leave gloo, and Megatron-DeepSpeed's four --no-...-fusion, out.
set -euo pipefail

checkout=$1 data=$2
shift 2
folder=$(mktemp -d)
export OMP_NUM_THREADS=1

if [ -d "$checkout/megatron/neox_arguments" ]; then
    cat > "$folder/job.yml" <<YML
{
  "pipe_parallel_size": 0, "model_parallel_size": 1, "num_layers": 2, "hidden_size": 32, "num_attention_heads": 4,
  "seq_length": 32, "max_position_embeddings": 32, "norm": "layernorm", "pos_emb": "rotary", "no_weight_tying": true,
  "optimizer": {"type": "adam", "params": {"lr": 0.001}}, "zero_optimization": {"stage": 1}, "precision": "fp32",
  "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4, "train_iters": 20, "lr_decay_iters": 20,
  "eval_interval": 10, "eval_iters": 1, "log_interval": 1, "data_path": "$data", "data_impl": "mmap", "num_workers": 0,
  "tokenizer_type": "CharLevelTokenizer", "distributed_backend": "gloo",
  "ft_plugins": {"reft": {"interval": 1}}
}
YML
    exec ft-run --nproc-per-node 2 "$checkout/train.py" "$folder/job.yml" --reft "$@"
fi

cat > "$folder/ds.json" <<JSON
{
  "train_batch_size": 8, "train_micro_batch_size_per_gpu": 1, "zero_optimization": {"stage": 1},
  "ft_plugins": {"reft": {"interval": 1}}
}
JSON
exec ft-run --nproc-per-node 2 "$checkout/pretrain_gpt.py" --reft --deepspeed --deepspeed_config "$folder/ds.json" \
    --zero-stage 1 --no-pipeline-parallel --distributed-backend gloo --num-layers 2 --hidden-size 32 \
    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1 --global-batch-size 8 \
    --train-iters 20 --lr 1e-3 --eval-interval 10 --eval-iters 1 --data-path "$data" --data-impl mmap --split 90,5,5 \
    --num-workers 0 --tokenizer-type NullTokenizer --vocab-size 127 --no-masked-softmax-fusion --no-bias-gelu-fusion \
    --no-bias-dropout-fusion --no-gradient-accumulation-fusion "$@"
