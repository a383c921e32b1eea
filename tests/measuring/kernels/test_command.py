from actbench.results.kernels import KernelReport

FEW = ("--op", "relu_mask,pack_codes", "--size", "8x64", "--seconds", "0", "--device", "cpu")


def test_exports_and_output(cli, tmp_path):
    markdown, csv, json = (tmp_path / f"table.{ending}" for ending in ("md", "csv", "json"))
    ended = cli(
        "kernels",
        *FEW,
        "--export-markdown",
        markdown,
        "--export-csv",
        csv,
        "--export-json",
        json,
        "-o",
        tmp_path / "out",
    )

    assert ended.status == 0, ended.err
    report = KernelReport.model_validate_json(json.read_bytes())
    assert [result.operator for result in report.results] == ["relu_mask", "pack_codes"]
    assert "relu_mask" in ended.out
    assert "| relu_mask |" in markdown.read_text()
    assert csv.read_text().startswith("operator,dtype,bits,size,seconds,")
    (written,) = (tmp_path / "out").glob("*.json")
    assert KernelReport.model_validate_json(written.read_bytes()) == report
    assert written.stem.startswith(report.machine.name)
    assert written.with_suffix(".md").read_text() == markdown.read_text()


def test_output_may_name_a_file(cli, tmp_path):
    ended = cli("kernels", *FEW, "--output", tmp_path / "mine.json")

    assert ended.status == 0, ended.err
    assert {path.name for path in tmp_path.iterdir()} == {"mine.json", "mine.md"}


def test_a_wrong_name_ends_with_2_and_one_message(cli):
    ended = cli("kernels", "--op", "relu_mas")

    assert ended.status == 2
    assert "--op 'relu_mas' is not one of" in ended.err
    assert "did you mean 'relu_mask'?" in ended.err
