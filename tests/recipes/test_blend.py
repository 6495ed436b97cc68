"""The command that makes weights between others."""

from __future__ import annotations

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
from safetensors.torch import load_file, save_file  # noqa: E402

from recipes.tiny_world.blend import main  # noqa: E402


def test_a_blend_lies_on_the_way_and_is_float16(tmp_path: Path):
    first, second, out = (str(tmp_path / f"{name}.safetensors") for name in ("first", "second", "out"))
    save_file({"a": torch.tensor([0.0, 4.0]).half()}, first)
    save_file({"a": torch.tensor([1.0, 0.0]).half()}, second)
    main([first, second, "--shares", "0.75", "0.25", "--out", out])
    assert torch.equal(load_file(out)["a"], torch.tensor([0.25, 3.0]).half())
    main([first, second, second, first, "--out", out])
    assert torch.equal(load_file(out)["a"], torch.tensor([0.5, 2.0]).half())


def test_shares_that_are_not_one_for_each_file_are_refused(tmp_path: Path, capsys):
    with pytest.raises(SystemExit):
        main([str(tmp_path / "a"), str(tmp_path / "b"), "--shares", "1", "--out", str(tmp_path / "out")])
    assert "1 shares for 2 files" in capsys.readouterr().err


def test_files_of_two_networks_are_refused_by_name(tmp_path: Path):
    first, second = (str(tmp_path / f"{name}.safetensors") for name in ("first", "second"))
    save_file({"a": torch.zeros(1), "gone": torch.zeros(1)}, first)
    save_file({"a": torch.zeros(1)}, second)
    with pytest.raises(KeyError, match="gone"):
        main([first, second, "--out", str(tmp_path / "out.safetensors")])
    assert not (tmp_path / "out.safetensors").exists()
