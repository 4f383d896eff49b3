#!/usr/bin/env bash
MODEL_PATH=${MODEL_PATH:-Qwen/Qwen3-8B}
LR=1e-6

DATA=(
    algorithm.adv_estimator=rloo
    data.train_files="['/data/a.parquet', '/data/b.parquet']"   # two files
    data.train_batch_size=128
)

ACTOR=(
    actor_rollout_ref.model.path="$MODEL_PATH"
    actor_rollout_ref.actor.optim.lr=${LR}
    actor_rollout_ref.actor.ppo_mini_batch_size=64
    actor_rollout_ref.rollout.name=vllm
    actor_rollout_ref.rollout.n=4
)
ACTOR+=(actor_rollout_ref.actor.entropy_coeff=0.001)

TRAINER=(
    trainer.logger='["console"]'
    trainer.total_training_steps=50
)

python3 -m verl.trainer.main_ppo \
    "${DATA[@]}" \
    "${ACTOR[@]}" \
    "${TRAINER[@]}" \
    "$@"
