"""The modules of a page become few files.

1. The modules of the first view become one file, with the same exports under the old names.
2. A later view is one file: it imports the file of the first view and nothing else.
3. Other forms of imports and exports are refused.
"""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from agentjet.server.page_modules import JOINED, joined

MODULES = {
    "begun.js": "export const take = () => 1;",
    "lib/base.js": "var n=1,a=()=>n;export{a as one,n as number};",
    "lib/wrap.js": 'import{one as n}from"./base.js";export{number}from"./base.js";export{x as twice};var x=()=>2*n();',
    "lib/text.js": "export default function (parts) { return parts.join(); }",
    "parts/sum.js": 'import { twice, number } from "../lib/wrap.js";\nimport join from "../lib/text.js";\n'
    "export const sum = () => twice() + number;\nexport class Row {}\n"
    "export async function* rows() { yield join([1, 2]); }",
    "parts/own.js": 'import { sum } from "./sum.js";\nexport const own = () => [sum];',
    "views/late.js": 'import { own } from "../parts/own.js";\nimport { sum } from "../parts/sum.js";\n'
    "export const LateView = () => own()[0] === sum;",
    "app.js": 'import { take } from "./begun.js";\nimport { sum, rows } from "./parts/sum.js";\n'
    "const [row] = [(await rows().next()).value];\nconst later = await import(`./parts/${'sum'}.js`);\n"
    "const { LateView } = await import('./views/late.js?attempt=2');\n"
    "console.log(JSON.stringify([take(), sum(), row, later.sum === sum, LateView()]));",
}


def files_of(modules: dict[str, str]) -> dict[str, bytes]:
    encoded = {name: text.encode() for name, text in modules.items()}
    return joined(encoded, "app.js", later=("views/late.js", "parts/sum.js"), apart=("begun.js",))


def test_a_later_view_is_one_file() -> None:
    sources = re.findall(r'(?:from |import\()"([^"]+)"', files_of(MODULES)["views/late.js"].decode())
    assert sources == [f"../{JOINED}"]


@pytest.mark.needs("node")
def test_the_joined_modules_do_the_same(tmp_path: Path) -> None:
    replaced = {name: content.decode() for name, content in files_of(MODULES).items()}
    assert {*replaced} == {*MODULES, JOINED} - {"begun.js", "parts/own.js"}
    for folder, files in (("apart", MODULES), ("joined", {**MODULES, **replaced})):
        for name, text in {**files, "package.json": '{"type": "module"}'}.items():
            path = tmp_path / folder / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        done = subprocess.run(["node", tmp_path / folder / "app.js"], capture_output=True, text=True, check=True)
        assert json.loads(done.stdout) == [1, 3, "1,2", True, True], folder


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"parts/sum.js": 'import * as all from "../lib/wrap.js";'}, "parts/sum.js: import .* is not known"),
        ({"parts/sum.js": "export let sum = 1;"}, "parts/sum.js: export let sum = 1;: .* is not known"),
        ({"lib/base.js": 'import { sum } from "../parts/sum.js";\nexport const one = sum;'}, "import each other"),
    ],
)
def test_other_forms_are_refused(changed: dict[str, str], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        files_of({**MODULES, **changed})
