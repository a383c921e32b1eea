from __future__ import annotations

from pathlib import Path

import pytest
import torch
from pydantic import TypeAdapter

from actbench.errors import ConversionError, ModelError, SpecError, StoreError
from actbench.model.records import Case
from actbench.tools.convert import workload
from actbench.tools.convert.folders import load_converted
from actbench.tools.convert.report import ConversionReport, ConversionRequest
from actbench.tools.convert.workload import convert_workload

MODEL = "roberta-base@num_hidden_layers=2,hidden_size=32,num_attention_heads=2,intermediate_size=64,vocab_size=99"
SAMPLES, TOKENS = 2, 16
SPEC = "fewbit:3+randomized:0.5"


def case(model: str = MODEL, scheme: str = SPEC, **changes: object) -> Case:
    return Case.model_validate(
        {"model": model, "scheme": scheme, "batch_size": SAMPLES, "sequence_length": TOKENS, **changes}
    )


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> ConversionReport:
    """Return the report of a model that was converted and written."""
    return convert_workload(case(), tmp_path_factory.mktemp("converted") / "model")


def test_a_dry_run_tells_everything_and_writes_nothing(tmp_path: Path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    report = convert_workload(case(), None)
    elements = SAMPLES * TOKENS * 64
    acts = [site for site in report.sites if site.path.endswith("intermediate_act_fn")]
    assert [(site.bytes_before, site.bytes_after, site.calls) for site in acts] == 2 * [
        (4 * elements, elements * 3 // 8, 1)
    ]
    assert report.folder is None
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("model", "folder"),
    [("hf:org/name", "org-name-fewbit-3"), ("torchvision:swin_t", "swin_t-fewbit-3"), ("swin_t", "swin_t-fewbit-3")],
)
def test_the_folder_is_called_after_the_model_and_the_scheme(monkeypatch, model: str, folder: str):
    def written(_case: Case, found: Path, *, force: bool, probe: bool) -> None:
        raise StoreError(f"{found} is there, {force}")

    monkeypatch.setattr(workload, "convert_workload", written)
    request = ConversionRequest(case(model, "fewbit:3"), output=None, dry_run=False, force=False)

    with pytest.raises(StoreError, match=f"^{folder} is there, False$"):
        workload.convert(TypeAdapter(ConversionRequest).dump_json(request).decode())


def test_the_sites_account_for_what_the_conversion_saves(written: ConversionReport):
    saved = sum((site.bytes_before or 0) - (site.bytes_after or 0) for site in written.sites)
    assert written.bytes_before - written.bytes_after == saved > 0


@pytest.mark.slow
def test_the_order_of_schemes_does_not_matter():
    one, other = (convert_workload(case(scheme="+".join(parts)), None) for parts in _orders())
    assert one.bytes_after == other.bytes_after
    assert one.sites == other.sites


def _orders() -> list[list[str]]:
    parts = SPEC.split("+")
    return [parts, parts[::-1]]


def test_the_written_model_comes_back_with_the_same_sites(written: ConversionReport):
    assert written.folder is not None
    model = load_converted(written.folder)
    assert model.actbench_conversion.sites == written.sites
    assert written.weights_origin == "random"
    ids = torch.arange(TOKENS)[None]
    again = load_converted(written.folder)
    assert torch.equal(model(ids).logits, again(ids).logits)


def test_a_converted_folder_can_be_the_model_again(written: ConversionReport):
    report = convert_workload(case(model=str(written.folder), weights="pretrained"), None)
    assert report.bytes_after < report.bytes_before


@pytest.mark.slow
def test_out_proj_of_torchvision_is_reported_and_not_counted():
    report = convert_workload(case("vit_b_16", "randomized:0.5", sequence_length=None), None)
    assert not any(site.path.endswith("out_proj") for site in report.sites)
    assert any(place.path.endswith("out_proj") for place in report.unreached)
    assert all(site.calls == 1 for site in report.sites)


@pytest.mark.sampled(fast=1, slow=1)
@pytest.mark.parametrize("scheme", ["exact", "fewbit:3,functions=gelu"])
def test_converting_nothing_is_an_error_and_writes_nothing(tmp_path: Path, scheme: str):
    with pytest.raises(ConversionError):
        convert_workload(case("resnet18", scheme, sequence_length=None), tmp_path / "model")
    assert not list(tmp_path.iterdir())


def test_a_taken_folder_is_told_before_the_model_is_built(tmp_path: Path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StoreError, match="not empty"):
        convert_workload(case("no-such-model"), tmp_path)


def test_unknown_models_and_schemes_are_refused():
    with pytest.raises(ModelError):
        convert_workload(case("no-such-model"), None)
    with pytest.raises(SpecError):
        convert_workload(case(scheme="no-such-scheme"), None)
