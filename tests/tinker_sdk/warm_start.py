"""A script of the Tinker SDK: a few supervised steps on boxed answers, any number of the question each, and the path of
the state."""

import random
import re
import sys

import datasets
import tinker
from tinker_cookbook import model_info, renderers
from tinker_cookbook.supervised.data import conversation_to_datum
from tinker_cookbook.tokenizer_utils import get_tokenizer

SUFFIX = " Provide a numerical answer without units, written inside \\boxed{}."


def main(model: str, steps: int) -> None:
    renderer = renderers.get_renderer(model_info.get_recommended_renderer_name(model), get_tokenizer(model))
    rng, rows = random.Random(0), datasets.load_dataset("openai/gsm8k", "main")["train"]
    data = []
    for row in rows:
        number = rng.choice(re.findall("[0-9]", row["question"]))
        said = [("user", row["question"] + SUFFIX), ("assistant", f"\\boxed{{{number}}}")]
        talk = [{"role": role, "content": content} for role, content in said]
        data.append(conversation_to_datum(talk, renderer, 512, renderers.TrainOnWhat.LAST_ASSISTANT_MESSAGE))
    client = tinker.ServiceClient()
    training = client.create_lora_training_client(model, rank=8, seed=0).result()
    for step in range(steps):
        training.forward_backward(data[step * 6 : step * 6 + 6], "cross_entropy")
        training.optim_step(tinker.AdamParams(learning_rate=5e-4)).result()
    sys.stdout.write(training.save_state("warm").result().path + "\n")


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
