#!/usr/bin/env bash
set -x

# two sets; don't shuffle them by hand
gsm8k_train=$HOME/data/gsm8k/train.parquet
math_train=$HOME/data/math/train.parquet

train_files="['$gsm8k_train', '$math_train']"

python3 -m verl.trainer.main_ppo \
    algorithm.adv_estimator=grpo \
    data.train_files="$train_files" \
    data.train_batch_size=1024 \
    data.filter_overlong_prompts=True \
    data.truncation='error' \
    actor_rollout_ref.model.path=Qwen/Qwen2-7B-Instruct \
    actor_rollout_ref.actor.use_kl_loss=True \
    actor_rollout_ref.actor.kl_loss_coef=0.001 \
    actor_rollout_ref.actor.kl_loss_type=low_var_kl \
    actor_rollout_ref.rollout.name=vllm \
    actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
    actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
    actor_rollout_ref.rollout.n=5 \
    trainer.logger='["console","wandb"]' \
    trainer.project_name='verl_grpo_example' \
    trainer.experiment_name='qwen2_7b' \
    trainer.n_gpus_per_node=8 \
    trainer.total_epochs=15 $@
