"""From a robot's observation to a network's inputs, and from a chunk to robot units."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sentencepiece
import torch
from numpy.typing import NDArray

from realtime_omni.errors import ArgumentError, ConfigError
from realtime_omni.models.common.vla.images import Fit, model_image, signed
from realtime_omni.models.common.vla.normalize import Dialect, Mode, Normalizer
from realtime_omni.models.common.vla.processing import Processing
from realtime_omni.models.common.vla.prompts import PromptForm, load_tokenizer, prompt_text, state_levels
from realtime_omni.models.common.vla.relative import relative_mask, to_absolute, to_relative


class Letters:
    """A tokenizer of letters."""

    def encode(self, text: str) -> list[int]:
        return [ord(letter) for letter in text]


def normalizer(channels: int, shift: float) -> Normalizer:
    numbers = {"mean": np.full(channels, shift, np.float32), "std": np.full(channels, 2.0, np.float32)}
    return Normalizer.of(Mode.MEAN_STD, Dialect.LEROBOT, numbers, "feature")


def processing(relative: tuple[bool, ...] | None = None, form: PromptForm = PromptForm.LINE) -> Processing:
    return Processing(
        cameras=("top", "wrist"),
        image_size=8,
        fit=Fit.CENTRED,
        prompt=form,
        prompt_tokens=60,
        tokenizer=Letters(),
        vocabulary=128,
        state=normalizer(3, 1.0),
        action=normalizer(3, 0.5),
        state_channels=3,
        action_channels=3,
        state_dim=5,
        action_dim=4,
        relative=relative,
    )


STATE = np.asarray([1.0, 3.0, -1.0], np.float32)
PICTURE = np.full((4, 8, 3), 255, np.uint8)


def test_one_row_is_normalised_padded_and_masked() -> None:
    row = processing().inputs({"wrist": PICTURE}, STATE, "go")
    assert row.state[0].tolist() == pytest.approx([0.0, 1.0, -1.0, 0.0, 0.0])
    assert row.image_mask.tolist() == [[False, True]]
    assert (row.images[0, 0] == -1).all()
    assert row.images[0, 1, 0, :, 0].tolist() == [-1, -1, 1, 1, 1, 1, -1, -1]
    assert row.tokens[0].tolist() == [ord(c) for c in "go\n"]
    assert row.token_mask.all()


@pytest.mark.parametrize(
    ("images", "state", "prompt", "path"),
    [
        ({}, STATE, "go", "images"),
        ({"side": PICTURE}, STATE, "go", "images.side"),
        ({"top": PICTURE.transpose(2, 0, 1)}, STATE, "go", "images.top"),
        ({"top": PICTURE[..., :1]}, STATE, "go", "images.top"),
        ({"top": PICTURE[:0]}, STATE, "go", "images.top"),
        ({"top": PICTURE.astype(np.float64)}, STATE, "go", "images.top"),
        ({"top": PICTURE.astype(np.float32)}, STATE, "go", "images.top"),
        ({"top": np.full((4, 4, 3), np.nan, np.float32)}, STATE, "go", "images.top"),
        ({"top": PICTURE}, STATE[:2], "go", "state"),
        ({"top": PICTURE}, STATE[None], "go", "state"),
        ({"top": PICTURE}, np.asarray([0, np.inf, 0], np.float32), "go", "state"),
        ({"top": PICTURE}, STATE, "go" * 40, "prompt"),
        ({"top": PICTURE}, STATE, "größer", "prompt"),
    ],
)
def test_a_bad_observation_is_refused_at_its_field(
    images: dict[str, NDArray[Any]], state: NDArray[np.float32], prompt: str, path: str
) -> None:
    with pytest.raises(ArgumentError) as refused:
        processing().inputs(images, state, prompt)
    assert refused.value.path == path


def test_a_chunk_is_cut_and_unnormalised() -> None:
    chunk = torch.ones(2, 4)
    assert processing().robot_actions(chunk, STATE).tolist() == [[2.5, 2.5, 2.5]] * 2


def test_relative_actions_come_back_absolute_except_the_gripper() -> None:
    actions = processing((True, True, False)).robot_actions(torch.ones(2, 4), STATE)
    assert actions.tolist() == [[3.5, 5.5, 2.5]] * 2


def test_an_old_chunk_anchored_to_a_moved_state_is_the_same_trajectory() -> None:
    """What RTC continues: old chunk -> robot units by the old state -> model space by the new one -> robot units again."""
    ours = processing((True, True, False))
    old = torch.randn(5, 4, generator=torch.Generator().manual_seed(0))
    moved = STATE + np.asarray([0.5, -0.25, 4.0], np.float32)
    absolute = ours.robot_actions(old, STATE)
    anchored = ours.model_actions(absolute, moved)
    assert np.abs(ours.robot_actions(anchored, moved) - absolute).max() <= 1e-6
    shift = (STATE - moved)[:2] / 2.0  # in units of std
    assert np.abs(anchored[:, :2].numpy() - (old[:, :2].numpy() + shift)).max() <= 1e-6
    assert (anchored[:, 2] - old[:, 2]).abs().max() <= 1e-6
    assert not anchored[:, 3].any()


def test_masks_by_joint_name() -> None:
    assert relative_mask(4, ["shoulder", "left_GRIPPER", "x"], ["gripper"]) == (True, False, True, True)
    assert relative_mask(2, None, ["gripper"]) == (True, True)
    actions, mask = np.ones((2, 3), np.float32), (True, False)
    assert to_relative(actions, STATE, mask).tolist() == [[0.0, 1.0, 1.0]] * 2
    assert to_absolute(actions, STATE, mask).tolist() == [[2.0, 1.0, 1.0]] * 2
    with pytest.raises(ValueError, match="mask of 4"):
        to_relative(actions, STATE, (True,) * 4)


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        (PromptForm.LINE, " pick_up \n"),
        (PromptForm.CLEAN_LINE, "pick up\n"),
        (PromptForm.STATE, "Task: pick up, State: -1 0 127 128 255 255;\nAction: "),
    ],
)
def test_prompt_texts(form: PromptForm, expected: str) -> None:
    """Bins of 1/128: below -1 is -1, -1 is 0, just below 0 is 127, 0 is 128; from 1 - 1/128 on it is 255."""
    state = np.asarray([-1.01, -1.0, -0.001, 0.0, 1.0, 9.0], np.float32)
    assert prompt_text(form, " pick_up ", state) == expected


def test_a_line_end_is_added_once() -> None:
    assert prompt_text(PromptForm.LINE, "go\n", STATE) == "go\n"
    assert state_levels(np.asarray([0.5], np.float32)) == [192]


@pytest.mark.parametrize(
    ("fit", "rows", "columns"),
    [
        (Fit.CENTRED, slice(2, 6), slice(0, 8)),
        (Fit.TOP_LEFT, slice(4, 8), slice(0, 8)),
        (Fit.PILLOW, slice(2, 6), slice(0, 8)),
    ],
)
def test_padding_is_black_and_where_the_reference_puts_it(fit: Fit, rows: slice, columns: slice) -> None:
    """A white 8 x 16 picture in 8 x 8: half height."""
    image = model_image(np.full((8, 16, 3), 255, np.uint8), 8, fit, "top")
    expected = torch.full((3, 8, 8), -1.0)
    expected[:, rows, columns] = 1.0
    assert torch.equal(image, expected)


@pytest.mark.parametrize("fit", list(Fit))
def test_a_picture_of_the_right_size_is_only_scaled(fit: Fit) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    expected = picture.transpose(2, 0, 1).astype(np.float32) / 255 * 2 - 1
    assert np.abs(model_image(picture, 8, fit, "top").numpy() - expected).max() <= 1e-6


@pytest.mark.parametrize("size", [8, 9])
def test_raw_pictures_are_the_same_once_they_are_signed(size: int) -> None:
    """Bytes stay bytes only where every picture has the tower's size."""
    images = {"wrist": np.random.default_rng(0).integers(0, 256, (8, size, 3), dtype=np.uint8)}
    row, raw = processing().inputs(images, STATE, "go"), processing().inputs(images, STATE, "go", raw=True)
    assert (raw.images.dtype == torch.uint8) == (size == 8)
    assert torch.equal(signed(raw.images[raw.image_mask]), row.images[row.image_mask])
    assert torch.equal(raw.image_mask, row.image_mask)


@pytest.mark.parametrize("fit", [Fit.CENTRED, Fit.TOP_LEFT])
def test_bytes_and_floats_are_the_same_picture(fit: Fit) -> None:
    picture = np.random.default_rng(0).integers(0, 256, (11, 5, 3), dtype=np.uint8)
    as_float = (picture / 255).astype(np.float32)
    assert (model_image(picture, 8, fit, "top") - model_image(as_float, 8, fit, "top")).abs().max() <= 1e-6


def test_a_sentencepiece_model_begins_with_its_beginning_of_text(tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(["pick up the block", "push the block left"] * 20),
        model_writer=model,
        vocab_size=20,
        bos_id=2,
        eos_id=1,
        unk_id=3,
        pad_id=0,
        minloglevel=2,
    )
    (tmp_path / "tokenizer.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path)
    ids = list(tokenizer.encode("pick up"))
    assert ids[0] == 2
    assert sentencepiece.SentencePieceProcessor(model_proto=model.getvalue()).decode(ids[1:]) == "pick up"


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer.model"])
def test_a_broken_tokenizer_is_refused_by_file(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"nonsense")
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)
