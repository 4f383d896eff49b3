set -x
ENGINE=${1:-vllm}
RANK=64
export MODEL=Qwen/Qwen2.5-3B-Instruct   # the base

nproc_per_gpu=29
nnodes=1
ngpu_per_node=1
total_procs=$(( nproc_per_gpu * nnodes * ngpu_per_node ))
mini_batch_size=$(( total_procs ))

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files=data/train.parquet \
    data.train_batch_size=${total_procs} \
    actor_rollout_ref.model.path=$MODEL \
    actor_rollout_ref.model.lora_rank=$RANK \
    actor_rollout_ref.model.lora_alpha=32 \
    actor_rollout_ref.model.target_modules=all-linear \
    actor_rollout_ref.actor.optim.lr=3e-5 \
    actor_rollout_ref.actor.ppo_mini_batch_size=${mini_batch_size} \
    actor_rollout_ref.rollout.name=$ENGINE \
    actor_rollout_ref.rollout.load_format=safetensors \
    actor_rollout_ref.rollout.layered_summon=True \
    actor_rollout_ref.rollout.n=5 \
    trainer.logger=['console'] \
    trainer.total_training_steps=100
