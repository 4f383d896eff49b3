"""Images from messages to tokens and pixels: every family against transformers' own processor."""

from __future__ import annotations

import io
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from failing import refused
from packaging.version import Version
from PIL import Image

from trivium.foundation.errors import DataError
from trivium.models.vision.images import Images, as_seen, decoded, images_of, join_pixels
from trivium.models.vision.processor import hf_processor
from trivium.text import hf_tokenizer
from trivium.text.renderer import ChatRenderer, renderer_of
from trivium.text.tiny_vision import TinyVisionModel
from trivium.types import Media, Message, Prompt, StopReason

FAMILIES = ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "llava", "smolvlm", "idefics3"]


def png(width: int, height: int, seed: int = 0, mode: str = "RGB") -> Media:
    shape = (height, width, len(mode)) if len(mode) > 1 else (height, width)
    pixels = np.random.default_rng(seed).integers(0, 256, shape, np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels, mode).save(file, "PNG")
    return Media("image/png", file.getvalue())


def opened(media: Media) -> Image.Image:
    """The image for a processor: before 5.20, those of transformers dropped its transparency, which is white."""
    image = Image.open(io.BytesIO(media.data))
    if image.mode != "RGBA" or Version(transformers.__version__) >= Version("5.20"):
        return image
    return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory):
    @cache
    def built(family: str) -> Path:
        config = TinyVisionModel.Config(architecture=family, vision_layers=1, layers=1, hidden=32, heads=4, mlp=8)
        return TinyVisionModel(config, seed=0).materialize(tmp_path_factory.mktemp(family) / "model")

    return built


def parts(*content: str | None) -> list[dict[str, str]]:
    return [{"type": "image"} if text is None else {"type": "text", "text": text} for text in content]


def reference(directory: Path, conversation: list[dict], images: list[Media], *, generation: bool = True):
    processor = hf_processor(directory)
    assert processor is not None
    text = processor.apply_chat_template(conversation, add_generation_prompt=generation)
    opened_images = [[opened(item) for item in images]] if images else None
    return processor(text=[text], images=opened_images, add_special_tokens=False, return_tensors="pt")


@pytest.mark.parametrize("family", FAMILIES)
def test_tokens_and_pixels_are_those_of_the_models_own_processor(family: str, model_dir) -> None:
    """Token for token and pixel for pixel, several images of several shapes, in a tool message as well."""
    media = [png(28, 28), png(61, 33, 1), png(14, 90, 2, "RGBA"), png(20, 20, 3, "L")]
    messages = [
        Message("system", "look"),
        Message("user", "<image>a\n<image>", (media[0], media[1])),
        Message("assistant", "b"),
        Message("tool", "c", (media[2],)),
        Message("user", "d<image>e", (media[3],)),
    ]
    conversation = [
        {"role": "system", "content": parts("look")},
        {"role": "user", "content": parts(None, "a\n", None)},
        {"role": "assistant", "content": parts("b")},
        {"role": "tool", "content": parts(None, "c")},
        {"role": "user", "content": parts("d", None, "e")},
    ]
    expected = reference(model_dir(family), conversation, media)
    renderer, images = renderer_of(model_dir(family)), images_of(model_dir(family))
    assert images is not None
    prompt = renderer.render(messages)
    assert prompt.tokens.tolist() == expected["input_ids"][0].tolist()
    assert [item.sha256 for item in prompt.media] == [item.sha256 for item in media]
    pixels = images.pixels(prompt.media)
    assert set(pixels) == set(expected) - {"input_ids", "attention_mask", "mm_token_type_ids"}
    for name, tensor in pixels.items():
        assert tensor.dtype == expected[name].dtype
        assert torch.equal(tensor, expected[name]), name
    in_spans = np.zeros(len(prompt), bool)
    for item in prompt.media:
        assert item.span is not None
        in_spans[slice(*item.span)] = True
    assert not (prompt.tokens[~in_spans] == images.token_id).any()
    assert (prompt.unexpanded == images.token_id).sum() == len(media)
    assert np.array_equal(prompt.unexpanded[prompt.unexpanded != images.token_id], prompt.tokens[~in_spans])
    first, rest = images.pixels(media[:1]), images.pixels(media[1:])
    joined = join_pixels([first, rest])
    assert all(torch.equal(joined[name], tensor) for name, tensor in pixels.items())


@pytest.mark.parametrize("family", FAMILIES)
def test_an_environment_answers_with_a_picture(family: str, model_dir) -> None:
    """Three turns: sampled tokens are kept, earlier spans stay, new media lie behind what was there."""
    renderer, images = renderer_of(model_dir(family)), images_of(model_dir(family))
    assert images is not None
    talk = [Message("user", "go", (png(28, 28),))]
    prompt = renderer.render(talk)
    vocabulary = np.random.default_rng(0)
    for turn in range(2):
        sampled = vocabulary.integers(0, 90, 5).astype(np.int32)
        seen = prompt.then(Prompt(sampled))
        talk.append(Message("assistant", renderer.decode(sampled)))
        new = [Message("tool", f"now <image> and <image>{turn}", (png(28, 14, turn), png(42, 28, turn)))]
        longer = renderer.extend(talk, seen, StopReason.LENGTH, new)
        assert longer.tokens[: len(seen)].tolist() == seen.tokens.tolist()
        assert longer.media[: len(prompt.media)] == prompt.media
        assert len(longer.media) == len(prompt.media) + 2
        for item in longer.media:
            assert item.span is not None
            start, end = item.span
            assert longer.tokens[start:end].tolist() == images.read(item).tokens.tolist()
        rendered = renderer.render([*talk, *new])
        assert longer.tokens[len(seen) :].tolist() == rendered.tokens[-(len(longer) - len(seen)) :].tolist()
        assert (longer.unexpanded == images.token_id).sum() == len(longer.media)
        talk += new
        prompt = longer


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_of_each_family_reads_its_images(family: str, model_dir) -> None:
    from transformers import AutoModelForImageTextToText

    model = AutoModelForImageTextToText.from_pretrained(model_dir(family))
    renderer, images = renderer_of(model_dir(family)), images_of(model_dir(family))
    assert images is not None

    def logits(media: Media) -> torch.Tensor:
        prompt = renderer.render([Message("user", "<image>?", (media,))])
        types = torch.tensor(prompt.tokens == images.token_id).long()[None]
        further = {"mm_token_type_ids": types} if family.startswith("qwen") else {}
        tokens = torch.tensor(prompt.tokens).long()[None]
        with torch.no_grad():
            return model(input_ids=tokens, **further, **images.pixels(prompt.media)).logits[0, -1]

    assert not torch.allclose(logits(png(28, 28, 0)), logits(png(28, 28, 1)))


@pytest.fixture(scope="module")
def qwen(model_dir) -> ChatRenderer:
    return renderer_of(model_dir("qwen2_vl"))


def test_without_marks_images_precede_the_text(qwen: ChatRenderer) -> None:
    media = (png(28, 28), png(14, 14))
    unmarked = qwen.render([Message("user", "two", media)])
    marked = qwen.render([Message("user", "<image><image>two", media)])
    assert (unmarked.tokens.tolist(), unmarked.media) == (marked.tokens.tolist(), marked.media)


def test_pictures_of_one_size_are_different_prompts(qwen: ChatRenderer) -> None:
    one, two = (qwen.render([Message("user", "?", (png(28, 28, seed),))]) for seed in (0, 1))
    assert np.array_equal(one.tokens, two.tokens)
    assert one.media != two.media
    again = qwen.render([Message("user", "?", (png(28, 28, 0),))])
    assert again.media == one.media


@pytest.mark.parametrize("content", ["<image>", "<image> <image> <image>"])
def test_marks_and_images_must_agree(qwen: ChatRenderer, content: str) -> None:
    with refused(DataError, "<image>", "2 image(s)"):
        qwen.render([Message("user", content, (png(14, 14), png(14, 14, 1)))])


@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "smolvlm"])
def test_the_text_of_a_placeholder_is_refused(family: str, model_dir) -> None:
    renderer = renderer_of(model_dir(family))
    token = images_of(model_dir(family)).token  # type: ignore[union-attr]
    seen = renderer.render([Message("user", "a", (png(14, 14),))])
    for messages in ([Message("user", f"a {token} b")], [Message("system", token), Message("user", "a")]):
        with refused(DataError, "reads it"):
            renderer.render(messages)
    history = [Message("user", "a"), Message("assistant", "x")]
    with refused(DataError, "'user'", repr(token)):
        renderer.extend(history, seen, StopReason.EOS, [Message("user", token)])
    with refused(DataError, "'assistant'", repr(token)):
        renderer.expert([Message("user", "a")], f"see {token}")
    # What the policy itself wrote is not encoded again.
    written = [Message("user", "a"), Message("assistant", token)]
    assert renderer.extend(written, seen, StopReason.LENGTH, [Message("user", "b")]).media == seen.media


def test_in_a_family_whose_placeholder_is_another_the_mark_is_text(qwen: ChatRenderer) -> None:
    prompt = qwen.render([Message("user", "an <image> tag")])
    assert not prompt.media
    assert "<image>" in qwen.decode(prompt.tokens)


def cut_short(media: Media) -> Media:
    return Media(media.mime, media.data[: len(media.data) // 2])


def bomb() -> Media:
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    return Media("image/png", file.getvalue())


@pytest.mark.parametrize(
    ("media", "message"),
    [
        (Media("image/png", b""), "damaged"),
        (Media("image/png", b"no picture"), "damaged"),
        (cut_short(png(64, 64)), "damaged"),
        (bomb(), "9000 x 9000"),
        (png(401, 1), "aspect ratio"),
        (Media("video/mp4", b"x"), "video"),
        (Media("audio/wav", b"x"), "audio"),
        (Media("image/svg+xml", b"<svg/>"), "damaged"),
    ],
    ids=["empty", "no image", "cut short", "bomb", "shape", "video", "audio", "svg"],
)
def test_what_is_no_usable_image_is_refused(qwen: ChatRenderer, media: Media, message: str) -> None:
    with refused(DataError, message):
        qwen.render([Message("user", "?", (media,))])


def test_the_largest_image_is_a_setting(model_dir) -> None:
    renderer = renderer_of(model_dir("qwen2_vl"), max_image_pixels=28 * 28)
    renderer.render([Message("user", "?", (png(28, 28),))])
    with refused(DataError, "784 pixels", "29 x 28", "workflow.max_image_pixels"):
        renderer.render([Message("user", "?", (png(29, 28),))])


@pytest.mark.parametrize("size", [(1, 1), (3, 3), (1, 3), (3, 1)])
@pytest.mark.parametrize("family", ["qwen2_vl", "llava", "smolvlm"])
def test_the_smallest_images_are_read(family: str, size: tuple[int, int], model_dir) -> None:
    assert len(renderer_of(model_dir(family)).render([Message("user", "?", (png(*size),))]).media) == 1


@pytest.mark.parametrize("family", ["qwen2_vl", "smolvlm"])
def test_images_are_read_in_one_form_where_torchvision_is_installed_too(
    family: str, model_dir, monkeypatch: pytest.MonkeyPatch
) -> None:
    """vLLM for GPUs brings it. Transformers has no processor of videos in the form that images are read in."""
    without = hf_processor(model_dir(family), backend="pil")
    monkeypatch.setattr("trivium.models.vision.processor.find_spec", lambda name: name)
    both = [Images(each).read(png(28, 28)) for each in (without, hf_processor(model_dir(family), backend="pil"))]
    assert torch.equal(*(each.pixels["pixel_values"] for each in both))


def test_a_text_model_has_no_images_and_a_processor_without_an_image_token_is_refused(tmp_path: Path) -> None:
    with refused(DataError, "images"):
        Images(object())


def test_a_template_for_text_alone_refuses_images(model_dir) -> None:
    directory, template = model_dir("qwen2_vl"), "{% for m in messages %}{{ m.content + '' }}{% endfor %}"
    plain = ChatRenderer(hf_tokenizer(directory), chat_template=template, images=images_of(directory))
    assert plain.decode(plain.render([Message("user", "text")]).tokens) == "text"
    with refused(DataError, "chat template"):
        plain.render([Message("user", "?", (png(14, 14),))])


def test_pixels_are_computed_once_for_a_picture(model_dir) -> None:
    images = images_of(model_dir("qwen2_vl"))
    assert images is not None
    media = png(28, 28)
    assert images.read(media) is images.read(Media("image/png", bytes(media.data)))


# --------------------------------------------------------------------------- the picture that is seen


def encoded(image: Image.Image, form: str = "PNG", **options) -> Media:
    file = io.BytesIO()
    image.save(file, form, **options)
    return Media(f"image/{form.lower()}", file.getvalue())


RAMP = np.tile(np.linspace(0, 65535, 52).astype(np.uint16), (4, 1))


def gray(media: Media) -> np.ndarray:
    """The first row, whose colours are equal."""
    pixels = np.asarray(decoded(media))
    assert pixels.shape[2] == 3
    assert (pixels == pixels[..., :1]).all()
    return pixels[0, :, 0].astype(int)


@pytest.mark.parametrize(
    ("media", "mode"),
    [
        (encoded(Image.fromarray(RAMP)), "I;16"),
        (encoded(Image.fromarray(RAMP), "TIFF"), "I;16"),
        (encoded(Image.fromarray(RAMP.astype(">u2")), "TIFF"), "I;16B"),
        (encoded(Image.fromarray(RAMP.astype(np.int32)), "TIFF"), "I"),
        (encoded(Image.fromarray((RAMP // 257).astype(np.int32)), "TIFF"), "I"),
        (encoded(Image.fromarray(RAMP.astype(np.int32) * 1000), "TIFF"), "I"),
        (encoded(Image.fromarray(RAMP.astype(np.int32) - 32768), "TIFF"), "I"),
        (encoded(Image.fromarray((RAMP / 65535).astype(np.float32)), "TIFF"), "F"),
        (encoded(Image.fromarray((RAMP / 257).astype(np.float32)), "TIFF"), "F"),
        (encoded(Image.fromarray(RAMP.astype(np.float32)), "TIFF"), "F"),
    ],
)
def test_deep_gray_is_scaled(media: Media, mode: str) -> None:
    assert Image.open(io.BytesIO(media.data)).mode == mode
    signed = mode == "I" and np.asarray(Image.open(io.BytesIO(media.data))).min() < 0
    expected = np.linspace(0, 255, 52)
    found = gray(media)
    if signed:  # from the lowest value to the end of the scale
        assert found[0] == 0
        assert (np.diff(found) >= 0).all()
        assert len({*found.tolist()}) == len(found)
    else:
        assert np.abs(found - expected).max() <= 1


def test_dark_deep_gray_stays_dark_and_what_is_no_number_is_black() -> None:
    assert gray(encoded(Image.fromarray(RAMP // 256))).max() == 1
    values = np.array([[0.5, np.nan, np.inf, -np.inf, 1.0]], np.float32)
    assert gray(encoded(Image.fromarray(values), "TIFF")).tolist() == [128, 0, 0, 0, 255]
    assert gray(encoded(Image.fromarray(np.zeros((2, 2), np.float32)), "TIFF")).tolist() == [0, 0]


def test_deep_gray_is_upright_and_its_transparent_value_is_white() -> None:
    exif = Image.Exif()
    exif[0x112] = 6
    media = encoded(Image.fromarray(RAMP), exif=exif.tobytes())
    assert decoded(media).size == RAMP.shape
    image = Image.fromarray(RAMP)
    assert gray(encoded(image, transparency=int(RAMP[0, 0])))[:2].tolist() == [255, 5]


@pytest.mark.parametrize(
    ("image", "options"),
    [
        (Image.new("RGBA", (8, 4), (0, 0, 0, 0)), {}),
        (Image.new("LA", (8, 4), (0, 0)), {}),
        (Image.new("P", (8, 4), 0), {"transparency": 0}),
        (Image.linear_gradient("L").resize((8, 4)), {"exif": 6}),
        (Image.linear_gradient("L").resize((8, 4)).convert("RGB"), {"exif": 3, "form": "JPEG"}),
        (Image.new("CMYK", (8, 4), (0, 255, 255, 0)), {"form": "JPEG"}),
        (Image.fromarray(RAMP), {"form": "TIFF"}),
    ],
)
def test_a_picture_as_it_is_seen_is_the_policys_for_any_reader(image: Image.Image, options: dict) -> None:
    form, orientation = options.pop("form", "PNG"), options.pop("exif", None)
    exif = Image.Exif()
    exif[0x112] = orientation or 1
    media = encoded(image, form, exif=exif.tobytes(), **options)
    seen = as_seen(media)
    assert seen.mime == "image/png"
    read = Image.open(io.BytesIO(seen.data))
    assert read.mode == "RGB"
    assert np.array_equal(np.asarray(read), np.asarray(decoded(media)))
    assert np.array_equal(np.asarray(decoded(seen)), np.asarray(decoded(media)))


def test_a_plain_picture_is_sent_as_it_is() -> None:
    for mode, form in (("RGB", "PNG"), ("L", "JPEG"), ("1", "PNG"), ("P", "GIF")):
        media = encoded(Image.new(mode, (4, 4)), form)
        assert as_seen(media) is media
