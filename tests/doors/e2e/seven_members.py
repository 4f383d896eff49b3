"""A train engine as a user of Trinity-RFT writes it: seven members, and a model of transformers."""

from __future__ import annotations

from pathlib import Path

import ray
import torch
from transformers import AutoModelForCausalLM

from trivium.frontdoors.trinity import Experience, Experiences, Synchronizer, TrainEngineWrapper

torch.set_num_threads(1)


class Seven(TrainEngineWrapper):
    """Raises the log-probability of what it is given: of an expert's tokens alike, of the policy's own by advantage."""

    def __init__(self, config):
        self.config, self.steps, self.calls, self.differences = config, 0, [], []

    def prepare(self):
        self.calls.append("prepare")
        saved = sorted(self.folder.glob("step-*"))
        source = saved[-1] if saved else Path(self.config.run.dir) / "model"
        self.steps = int(source.name.removeprefix("step-")) if saved else 0
        self.model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)

    @property
    def folder(self):
        return Path(self.config.run.dir) / "mine"

    @property
    def train_step_num(self):
        return self.steps

    def train_step(self, batch: Experiences):
        log_probs = self.log_probs(batch)
        mask = batch.action_masks
        if batch.advantages is None:
            weights = mask.float()
        else:
            weights = batch.advantages * mask
            self.differences.append((log_probs.detach() - batch.logprobs)[mask].abs().max().item())
        loss = -(weights * log_probs).sum() / mask.sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.steps += 1
        return True, {"loss": loss.item(), "mine/rows": batch.batch_size}

    def log_probs(self, batch):
        positions = (batch.attention_masks.long().cumsum(-1) - 1).clamp(min=0)
        logits = self.model(batch.tokens, attention_mask=batch.attention_masks.long(), position_ids=positions).logits
        every = logits[:, :-1].log_softmax(-1).gather(-1, batch.tokens[:, 1:, None])[..., 0]
        return every[:, batch.prompt_length - 1 :]

    def save_checkpoint(self, block_until_saved=False):
        self.calls.append(f"save {self.steps}")
        self.model.save_pretrained(self.folder / f"step-{self.steps}")

    def sync_weight(self):
        raise AssertionError("the method is not nccl")

    def upload_state_dict(self):
        self.calls.append(f"upload {self.steps}")
        self.synchronizer.set_model_state_dict(self.model.state_dict(), self.steps)

    def save_state_dict(self):
        self.calls.append(f"save weights {self.steps}")
        folder = self.folder / "weights"
        self.model.save_pretrained(folder)
        self.synchronizer.set_model_state_dict(folder, self.steps)


class Modern(Seven):
    """The same with the coroutines of Trinity-RFT 0.4."""

    async def prepare(self):
        super().prepare()

    async def train_step(self, batch_exps: list[Experience]) -> dict:
        assert isinstance(batch_exps, list)
        assert all(len(e.logprobs) == len(e.advantages) == len(e.tokens) - e.prompt_length for e in batch_exps)
        _, metrics = super().train_step(Experiences.gather_experiences(batch_exps))
        return metrics


class OnRay(Seven):
    """The same with the actor of the documents."""

    def __init__(self, config):
        super().__init__(config)
        self.synchronizer = Synchronizer.get_actor(config)

    def upload_state_dict(self):
        self.calls.append(f"upload {self.steps}")
        ray.get(self.synchronizer.set_model_state_dict.remote(self.model.state_dict(), self.steps))
