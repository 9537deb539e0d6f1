"""The report in a real browser: it draws every plot, and asks nobody for anything."""

import json
import re
import shutil
import subprocess
from html import escape, unescape
from pathlib import Path

import pytest

from fos_rl.compare import compare
from fos_rl.compare.drawing import colour, marker
from tests.compare.conftest import QUANTIZED

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
PLOTS = [
    "first-step",
    "reward-difference",
    "mismatch",
    "kl-k3",
    "reward",
    "clip-fraction",
    "grad-norm",
    "entropy",
    "length",
    "phases",
    "by-probability",
    "by-position",
    "routing-flips",
    "layer-error",
    "backward-modes",
    "scatter",
]
# The baseline has no difference from itself, and bf16 no backward mode.
_WITHOUT_BASELINE = {"plot-reward-difference", "plot-backward-modes"}
# Measures what the browser has laid out, before and after a click on the first arm's button.
_PROBE = """
<script>
  const parts = (figure) => [...figure.querySelectorAll('[id*="--arm0--"]')];
  const shown = (part) => getComputedStyle(part).display !== "none";
  const figures = [...document.querySelectorAll("figure.plot")];
  const before = figures.map((figure) => parts(figure).filter(shown).length);
  document.querySelector(".legend button").click();
  const found = figures.map((figure, n) => {
    const svg = figure.querySelector("svg"), box = svg?.getBoundingClientRect();
    return {
      id: figure.id, label: svg?.getAttribute("aria-label"), role: svg?.getAttribute("role"),
      width: box?.width ?? 0, height: box?.height ?? 0, text: figure.innerText,
      parts: figure.querySelectorAll('[id*="--arm"]').length,
      before: before[n], after: parts(figure).filter(shown).length,
    };
  });
  const ids = [...document.querySelectorAll("[id*='--arm']")].map((part) => part.id);
  const page = { found, wide: document.documentElement.scrollWidth, ids };
  document.body.innerHTML = "<pre id=probe></pre>";
  document.getElementById("probe").textContent = JSON.stringify(page);
</script>
"""


# What of a page in a frame lies outside it, or outside its own cell.
_NARROW_PROBE = """
<script>
  addEventListener("load", () => {
    const frame = document.querySelector("iframe");
    const inner = frame.contentDocument;
    const cells = [...inner.querySelectorAll("td, tr.section th, .summary li")];
    const outside = (cell) => {
      const box = cell.getBoundingClientRect();
      return box.left < 0 || box.right > 400 || cell.scrollWidth > cell.clientWidth + 1;
    };
    const row = [...inner.querySelectorAll("#arms ~ .card tr:not(.section) td")].slice(1, 4);
    const label = (cell) => frame.contentWindow.getComputedStyle(cell, "::before").content;
    const found = {
      width: frame.contentWindow.innerWidth, page: inner.documentElement.scrollWidth,
      cells: cells.length, cut: cells.filter(outside).map((cell) => cell.innerText),
      labels: row.map((cell) => label(cell).replaceAll('"', "")),
    };
    document.body.innerHTML = "<pre></pre>";
    document.querySelector("pre").textContent = JSON.stringify(found);
  });
</script>
"""


@pytest.fixture(scope="module")
def page(tmp_path_factory, write_run) -> str:
    """The page of three arms with every metric that a plot needs."""
    folder = tmp_path_factory.mktemp("page")
    names = ("reward/mean", "trainer/grad_norm", "policy/entropy", "rollout/response_length/mean")
    for arm, overrides in {"bf16": [], **QUANTIZED}.items():
        for seed in range(2):
            steps = [
                {
                    **dict.fromkeys(names, 1.0 + seed + step),
                    **{f"mismatch/log_prob_abs_diff/{q}": 0.01 for q in ("mean", "p99", "max")},
                    "mismatch/floor_log_prob_abs_diff/mean": 0.002,
                    "mismatch/kl_k3": 0.001,
                    # Exact zeros have to find a place on a logarithmic axis.
                    "loss/clip_frac": 0.1 * step,
                    **{f"time/{phase}_s": 1.0 for phase in ("generate", "train")},
                    **{f"mismatch/by_probability/{n}": 0.01 for n in range(10)},
                    **{f"mismatch/by_position/{n}": 0.01 for n in range(10)},
                    **{f"mismatch/routing_flip_frac/layer_{n}": 0.1 for n in range(4)},
                }
                for step in range(3)
            ]
            run = write_run(
                folder / "study" / arm / f"seed_{seed}",
                steps,
                rewards=[[0.0, 1.0]] * 3,
                overrides=overrides,
            )
            (run / "per_layer.json").write_text(json.dumps({"layers.0": 0.1, "layers.1": 0.2}))
    assert compare([folder / "study"], baseline="bf16") == []
    return (folder / "study/comparison/report.html").read_text()


def test_the_page_names_no_other_place(page: str) -> None:
    places = re.findall(r"""(?:src|href)\s*=\s*["']([^"']*)""", page)
    # Parts of the page itself, and images in it.
    assert places
    assert [place for place in places if not place.startswith(("#", "data:"))] == []
    assert not re.findall(r"@import|url\((?!#)|fetch\(|XMLHttpRequest", page)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install it")
def test_a_browser_draws_every_plot(page: str, tmp_path: Path) -> None:
    file = tmp_path / "probe.html"
    file.write_text(page.replace("</body>", _PROBE + "</body>"))
    dom = _rendered(file, tmp_path)
    laid_out = json.loads(unescape(re.findall(r'<pre id="probe">(.*?)</pre>', dom)[0]))
    found = laid_out["found"]
    assert [plot["id"] for plot in found] == [f"plot-{name}" for name in PLOTS]
    for plot in found:
        assert "No data" not in plot["text"], plot["id"]
        assert plot["role"] == "img"
        assert plot["label"]
        # Two plots side by side in 1400 pixels, or one across.
        assert plot["width"] > 550, plot["id"]
        assert plot["height"] > 200, plot["id"]
        assert plot["parts"] >= 2, plot["id"]
        assert plot["after"] == 0, plot["id"]
        assert (plot["before"] > 0) == (plot["id"] not in _WITHOUT_BASELINE), plot["id"]
    assert len(set(laid_out["ids"])) == len(laid_out["ids"])
    assert laid_out["wide"] <= 1400


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine: apt-get install it")
def test_a_page_of_400_pixels_cuts_no_cell(page: str, tmp_path: Path) -> None:
    """In a frame, since a browser's own window is wider."""
    narrow = page.replace("<details", "<details open")
    file = tmp_path / "narrow.html"
    style = "width: 400px; height: 900px; border: 0"
    frame = f'<iframe style="{style}" srcdoc="{escape(narrow)}"></iframe>'
    file.write_text(frame + _NARROW_PROBE)
    found = json.loads(unescape(re.findall(r"<pre>(.*?)</pre>", _rendered(file, tmp_path))[0]))
    assert found["width"] == 400
    assert found["page"] <= 400
    assert found["cells"] > 100
    assert found["cut"] == []
    # The arm's name stands in front of its value.
    assert found["labels"] == ["bf16", "dequantized", "high_precision"]


def test_words_come_first_then_plots_then_tables(page: str) -> None:
    places = [page.index(f'id="{name}"') for name in ("summary", "plots", "arms", "differences")]
    assert places == sorted(places)
    first = page[: page.index('id="plots"')]
    assert "the 95 % interval of the difference covers 0" in first
    assert "cannot be derived from these" in first
    assert "mean |d|" in first


def _rendered(file: Path, tmp_path: Path) -> str:
    """The page's elements after its scripts have run."""
    browser = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--enable-logging=stderr",
        f"--user-data-dir={tmp_path / 'profile'}",
        "--window-size=1400,900",
        "--dump-dom",
        file.as_uri(),
    ]
    done = subprocess.run(browser, capture_output=True, text=True, timeout=120, check=True)
    assert "CONSOLE" not in done.stderr
    return done.stdout


def test_arms_differ_in_colour_or_marker() -> None:
    assert len({(colour(n), marker(n)) for n in range(56)}) == 56
