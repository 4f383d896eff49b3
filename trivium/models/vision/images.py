"""The placeholder tokens and the pixels of images, for rollout engines and training.

The pixels of an image depend only on its bytes and the model's processor, so they are computed once for each hash. The
processor is that of transformers in its PIL form, with and without torchvision.
"""

from __future__ import annotations

import io
from collections import OrderedDict
from collections.abc import Generator, Mapping, Sequence
from contextlib import contextmanager
from functools import lru_cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from trivium.foundation.errors import ConfigError, DataError
from trivium.models.vision.processor import hf_processor
from trivium.types import IntArray, Media

if TYPE_CHECKING:
    from PIL.Image import Image
    from torch import Tensor

MAX_PIXELS = 64_000_000
"""The largest image by default, width times height: a file of a few kilobytes can hold billions of pixels."""
_FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
_CACHED_BYTES = 1 << 28
"""The largest memory of the cache."""
_ORIENTATION = 0x0112
"""The EXIF tag with the rotation of an image; 1 is upright."""
_SAME_PIXELS = 0.02
"""The largest mean difference between pixels that two image libraries resize."""
_TEXT_KEYS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids")
"""Outputs of a processor that describe text."""


class ImageInput(NamedTuple):
    """The inputs of a model for one image."""

    tokens: IntArray
    """Its tokens in a prompt: placeholders, and for some models tokens between them."""
    pixels: Mapping[str, Tensor]
    """The model's further inputs: `pixel_values`, and `image_grid_thw`, `pixel_attention_mask` or `image_sizes`."""


class Images:
    """Reads images for one model. Thread-safe."""

    def __init__(self, processor: Any, *, max_pixels: int = MAX_PIXELS) -> None:
        """`processor` is a transformers processor. Raises DataError if it has no token for images."""
        self._processor, self._max_pixels = processor, max_pixels
        token = getattr(processor, "image_token", None)
        if token is None or getattr(processor, "image_processor", None) is None:
            raise DataError(
                f"images in {type(processor).__name__}",
                "the processor has no image processor, or no token for images",
                "use a model of the families Qwen2-VL, Qwen2.5-VL, Qwen3-VL, LLaVA, SmolVLM or Idefics3",
            )
        self.token: str = token
        """The text of the placeholder: one for each image, until the prompt is expanded."""
        self.token_id: int = processor.tokenizer.get_vocab().get(token, -1)
        if self.token_id < 0:
            raise DataError(
                f"the placeholder {token!r} of {type(processor).__name__}",
                "the tokenizer has no such token",
                "save the tokenizer that belongs to the model",
            )
        named = (getattr(processor, f"{kind}_token", None) for kind in ("image", "video", "audio"))
        self.placeholders: frozenset[str] = frozenset(text for text in named if text)
        """Texts that the tokenizer reads as placeholders. No message may contain one."""
        self._cache: OrderedDict[str, ImageInput] = OrderedDict()
        self._cached_bytes, self._lock = 0, Lock()

    @property
    def chat_template(self) -> str | None:
        """The processor's chat template."""
        template = getattr(self._processor, "chat_template", None)
        return template.get("default") if isinstance(template, dict) else template

    def read(self, media: Media) -> ImageInput:
        """Tokens and pixels of one image. Raises DataError for other media, and for damaged or too large images."""
        with self._lock:
            entry = self._cache.get(media.sha256)
            if entry is not None:
                self._cache.move_to_end(media.sha256)
                return entry
        computed = self._compute(media)
        with self._lock:
            if self._cache.setdefault(media.sha256, computed) is computed:  # else another thread was faster
                self._cached_bytes += _size(computed)
            while self._cached_bytes > _CACHED_BYTES and len(self._cache) > 1:
                self._cached_bytes -= _size(self._cache.popitem(last=False)[1])
        return computed

    def pixels(self, media: Sequence[Media]) -> dict[str, Tensor]:
        """The model's inputs for the images of one sequence, in order; empty without images."""
        return join_pixels([self.read(item).pixels for item in media])

    def equals(self, other: Images) -> bool:
        """Whether both read a small and a large test image alike: with equal tokens, and with pixels whose mean
        difference is at most `_SAME_PIXELS`."""
        from PIL import Image

        for size in ((48, 32), (1600, 1200)):
            file = io.BytesIO()
            Image.linear_gradient("L").resize(size).save(file, "PNG")
            mine, theirs = (images.read(Media("image/png", file.getvalue())) for images in (self, other))
            if mine.tokens.tolist() != theirs.tokens.tolist() or mine.pixels.keys() != theirs.pixels.keys():
                return False
            for name, tensor in mine.pixels.items():
                same_shape = tensor.shape == theirs.pixels[name].shape
                if not same_shape or (tensor.double() - theirs.pixels[name].double()).abs().mean() > _SAME_PIXELS:
                    return False
        return True

    def _compute(self, media: Media) -> ImageInput:
        import torch

        image = decoded(media, self._max_pixels)
        try:
            inputs = self._processor(
                images=[image], text=[self.token], add_special_tokens=False, return_tensors="np", padding=False
            )
        except (ValueError, TypeError, IndexError, ZeroDivisionError) as error:  # an extreme shape, for example
            raise DataError(
                f"the pixels of {_described(media)}, {image.width} x {image.height}",
                f"{type(self._processor).__name__}: {error}",
                "leave the image out, or use another aspect ratio",
            ) from error
        tokens = np.asarray(inputs["input_ids"], np.int32)[0]
        tokens.flags.writeable = False  # the cache gives the same array to every reader
        arrays = {name: np.asarray(value) for name, value in inputs.items() if name not in _TEXT_KEYS}
        return ImageInput(tokens, {name: torch.from_numpy(np.ascontiguousarray(a)) for name, a in arrays.items()})


def images_of(model_dir: str | Path, *, max_pixels: int = MAX_PIXELS) -> Images | None:
    """The images of the model in a directory; None for a text model. Raises what `hf_processor` raises."""
    processor = hf_processor(model_dir, backend="pil")
    return None if processor is None else Images(processor, max_pixels=max_pixels)


def check_processor(images: Images, model_dir: str | Path) -> None:
    """Raises ConfigError if a processor reads images in another way than that of the model directory, which rollout
    engines and training ranks use."""
    saved = images_of(model_dir)
    if saved is None or not saved.equals(images):
        raise ConfigError(
            f"the processor of the model {model_dir}",
            "the model has none" if saved is None else "the given processor reads images differently",
            "save it there (processor.save_pretrained), or pass the model's own: hf_processor(model path)",
        )


def decoded(media: Media, max_pixels: int = MAX_PIXELS) -> Image:
    """Decodes an image to RGB, upright, transparent parts on white. Raises DataError if that fails."""
    from PIL import Image, ImageOps

    with opened(media, max_pixels) as image:
        image = ImageOps.exif_transpose(image)
        if image.mode[0] in "IF":
            image = _eight_bits(image)
        if "A" not in image.getbands() and "transparency" not in image.info:
            return image.convert("RGB")
        image = image.convert("RGBA")
        return Image.alpha_composite(Image.new("RGBA", image.size, "white"), image).convert("RGB")


def _eight_bits(image: Image) -> Image:
    """Gray values of more than 8 bits, scaled to 8: `convert` clips them. The scale ends at 16 bits where the mode says
    it, else at the smallest of 1 (floats), 8 and 16 bits that holds all values, else at the highest value."""
    from PIL import Image

    values = np.nan_to_num(np.asarray(image, np.float64), posinf=0.0, neginf=0.0)
    scales = (65535,) if image.mode.startswith("I;16") else (1, 255, 65535) if image.mode == "F" else (255, 65535)
    low, high = min(0.0, values.min()), values.max()
    high = next((float(scale) for scale in scales if high <= scale), high)
    gray = np.rint((values - low) * (255 / (high - low))).astype(np.uint8)
    gray[values == image.info.get("transparency", np.nan)] = 255  # white, as all that is transparent
    return Image.fromarray(gray)


@lru_cache(maxsize=32)  # the members of a group have the same images
def as_seen(media: Media) -> Media:
    """An image that any reader decodes as the policy sees it: itself, or a PNG in place of one that is rotated by its
    EXIF data, transparent, of more than 8 bits or in other colours. Raises DataError for other media, and for an image
    that cannot be decoded."""
    with opened(media) as image:
        turned = image.getexif().get(_ORIENTATION, 1) != 1
        plain = image.mode in ("1", "L", "P", "RGB") and "transparency" not in image.info
    if plain and not turned:
        return media
    written = io.BytesIO()
    decoded(media).save(written, format="PNG")
    return Media("image/png", written.getvalue())


def check_image(media: Media, max_pixels: int = MAX_PIXELS) -> None:
    """Raises DataError for other media, and for images that are too large or whose file is visibly damaged."""
    with opened(media, max_pixels) as image:
        image.verify()


@contextmanager
def opened(media: Media, max_pixels: int = MAX_PIXELS) -> Generator[Image]:
    """Opens an image without decoding it. Errors inside the block become DataErrors, too."""
    from PIL import Image, UnidentifiedImageError

    kind = media.mime.partition("/")[0]
    if kind != "image":
        raise DataError(f"read {_described(media)}", f"{kind} is not supported", "use images and text")
    try:
        image = Image.open(io.BytesIO(media.data), formats=_FORMATS)
        if image.width * image.height > max_pixels:
            raise Image.DecompressionBombError(f"{image.width} x {image.height} pixels")
        yield image
    except (Image.DecompressionBombError, Image.DecompressionBombWarning) as error:
        raise DataError(
            f"an image of at most {max_pixels} pixels",
            f"{_described(media)}: {error}",
            "make it smaller, or raise workflow.max_image_pixels",
        ) from error
    except Exception as error:  # decoders raise many types for damaged bytes: struct.error, IndexError, ...
        problem = f"none of {', '.join(_FORMATS)}" if isinstance(error, UnidentifiedImageError) else str(error)
        raise DataError(
            f"decode {_described(media)}, {len(media.data)} bytes",
            f"a missing or damaged image: {problem}",
            "give the bytes of a whole image file",
        ) from error


def join_pixels(parts: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """Joins the inputs of several images, or of several sequences, to those of one sequence."""
    import torch

    if not parts:
        return {}
    # Idefics has (1, tiles, ...) for a sequence. Models with `image_sizes` have (images, tiles, ...), and images
    # with fewer tiles are padded.
    by_tile = parts[0]["pixel_values"].ndim == 5 and "image_sizes" not in parts[0]
    joined: dict[str, Tensor] = {}
    for name in parts[0]:
        tensors = [part[name] for part in parts]
        tiles = max(t.shape[1] for t in tensors) if tensors[0].ndim == 5 else 0
        if not by_tile and tiles:
            tensors = [torch.cat([t, t.new_zeros(len(t), tiles - t.shape[1], *t.shape[2:])], dim=1) for t in tensors]
        joined[name] = torch.cat(tensors, dim=1 if by_tile else 0)
    return joined


def _size(entry: ImageInput) -> int:
    return entry.tokens.nbytes + sum(tensor.nbytes for tensor in entry.pixels.values())


def _described(media: Media) -> str:
    return f"the media {media.mime} {media.sha256[:12]}"
