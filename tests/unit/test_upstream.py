"""native/upstream.py, run as a person runs it, against a small upstream of our own: real git, pip, CMake and Ninja."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import textwrap
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from upstreamlib.pins import sha256_file

REPOSITORY = Path(__file__).resolve().parents[2]

# A build backend without requirements, so that pip can prepare the package's metadata offline.
BACKEND = """
def prepare_metadata_for_build_wheel(directory, config_settings=None):
    import pathlib
    info = pathlib.Path(directory) / "tiny_llama-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\\nName: tiny-llama\\nVersion: 1.0\\n")
    (info / "WHEEL").write_text("Wheel-Version: 1.0\\nTag: py3-none-any\\n")
    return info.name
"""

GIT_IDENTITY = ("-c", "user.name=Test", "-c", "user.email=test@localhost", "-c", "commit.gpgSign=false")


def git(directory: Path, *arguments: str) -> str:
    done = subprocess.run(
        ["git", *GIT_IDENTITY, "-C", str(directory), *arguments], capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@dataclass
class Checkout:
    """A checkout with our upstream.py, pinned to a small upstream repository and a source package of it."""

    root: Path
    upstream: Path
    packages: Path
    commit: str
    environment: dict[str, str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.environment = {
            "PATH": os.environ["PATH"],
            "HOME": str(self.root),
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_NO_INDEX": "1",
            "PIP_FIND_LINKS": str(self.packages),
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        self.pin()

    @property
    def tree(self) -> Path:
        return self.root / "build" / "upstream" / "llama.cpp"

    @property
    def patches(self) -> Path:
        return self.root / "native" / "patches"

    def pin(self, *, sha256: str | None = None, url: str | None = None, requirement: str = "tiny-llama==1.0") -> None:
        """Write upstream.toml without patches; by default everything in it is right."""
        (self.root / "native" / "upstream.toml").write_text(
            textwrap.dedent(f"""
            commit = "{self.commit}"
            [[sources]]
            kind = "sdist"
            requirement = "{requirement}"
            file = "tiny_llama-1.0.tar.gz"
            sha256 = "{sha256 or sha256_file(self.packages / "tiny_llama-1.0.tar.gz")}"
            tree = "vendor/llama.cpp"
            git_dir = ".git/modules/vendor/llama.cpp"
            [[sources]]
            kind = "git"
            url = "{url or self.upstream}"
            [build]
            options = ["TINY_OPTION=ON"]
            [limits]
            max_added_lines = 5
            untouched = ["src/models/"]
            # The patch stack, in order. Written by seal.
            """)
        )

    def run(self, *arguments: str, path: str | None = None) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "native/upstream.py", *arguments],
            cwd=self.root,
            env=self.environment | ({"PATH": path} if path is not None else {}),
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    def succeed(self, *arguments: str) -> str:
        done = self.run(*arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def fail(self, *arguments: str, path: str | None = None) -> str:
        """The error line of a run that must fail with exit code 1."""
        done = self.run(*arguments, path=path)
        assert done.returncode == 1, (done.stdout, done.stderr)
        assert "Traceback" not in done.stderr
        return done.stderr[done.stderr.index("upstream: error: ") + len("upstream: error: ") :].strip()

    def patch(self, name: str, file: str, old: str, new: str) -> None:
        """Add a patch file made of one replacement in the tree as it is now, leaving the tree as it was."""
        target = self.tree / file
        before = target.read_text()
        assert old in before
        target.write_text(before.replace(old, new))
        diff = git(self.tree, "diff")
        target.write_text(before)
        self.patches.mkdir(exist_ok=True)
        (self.patches / name).write_text(f"{diff}\n")


def write_upstream(directory: Path) -> str:
    """A repository with one file that is patched, one that must not be, and a build; its commit."""
    (directory / "src" / "models").mkdir(parents=True)
    (directory / "src" / "a.cpp").write_text("int a() {\n    return 1;\n}\n")
    (directory / "src" / "b.cpp").write_text("int b() {\n    return 2;\n}\n")
    (directory / "src" / "models" / "m.cpp").write_text("int m() {\n    return 3;\n}\n")
    script = directory / "run.sh"
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    (directory / "CMakeLists.txt").write_text(
        "add_library(llama STATIC src/a.cpp src/b.cpp src/models/m.cpp)\nadd_executable(tool src/main.cpp)\n"
        "target_link_libraries(tool llama)\n"
    )
    (directory / "src" / "main.cpp").write_text(
        '#include <cstdio>\nint a();\nint b();\nint main() { std::printf("%d\\n", 10 * a() + b()); }\n'
    )
    git(directory, "init", "--quiet")
    git(directory, "add", "--all")
    git(directory, "commit", "--quiet", "-m", "pinned")
    return git(directory, "rev-parse", "HEAD")


def write_package(upstream: Path, packages: Path, work: Path, *, change: tuple[str, str] | None = None) -> None:
    """A source package that carries the tree and its git directory; ``change`` replaces one file's contents."""
    top = work / "tiny_llama-1.0"
    module = top / ".git" / "modules" / "vendor" / "llama.cpp"
    git(work, "clone", "--quiet", "--depth", "1", f"file://{upstream}", str(top / "vendor" / "llama.cpp"))
    module.parent.mkdir(parents=True)
    shutil.move(top / "vendor" / "llama.cpp" / ".git", module)
    (top / "vendor" / "llama.cpp" / ".git").write_text("gitdir: ../../.git/modules/vendor/llama.cpp\n")
    # Whatever a packaged git directory configures must not be run.
    (module / "hooks").mkdir(exist_ok=True)
    hook = module / "hooks" / "post-checkout"
    hook.write_text("#!/bin/sh\ntouch hook-was-run\n")
    hook.chmod(0o755)
    if change is not None:
        (top / "vendor" / "llama.cpp" / change[0]).write_text(change[1])
    (top / "pyproject.toml").write_text(
        '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'
        '[project]\nname = "tiny-llama"\nversion = "1.0"\n'
    )
    (top / "PKG-INFO").write_text("Metadata-Version: 2.1\nName: tiny-llama\nVersion: 1.0\n")
    (top / "backend.py").write_text(BACKEND)
    packages.mkdir(exist_ok=True)
    with tarfile.open(packages / "tiny_llama-1.0.tar.gz", "w:gz") as archive:
        archive.add(top, top.name)


@pytest.fixture(scope="session")
def fetched_once(tmp_path_factory: pytest.TempPathFactory) -> Checkout:
    """Not for tests to change: `checkout` and `fetched` are copies of it."""
    place = tmp_path_factory.mktemp("upstream")
    (place / "upstream").mkdir()
    commit = write_upstream(place / "upstream")
    (place / "work").mkdir()
    write_package(place / "upstream", place / "packages", place / "work")
    native = place / "checkout" / "native"
    shutil.copytree(
        REPOSITORY / "native" / "upstreamlib", native / "upstreamlib", ignore=shutil.ignore_patterns("__pycache__")
    )
    shutil.copy(REPOSITORY / "native" / "upstream.py", native)
    made = Checkout(place / "checkout", place / "upstream", place / "packages", commit)
    made.succeed("fetch")
    return made


@pytest.fixture
def fetched(fetched_once: Checkout, tmp_path: Path) -> Checkout:
    """A checkout with the unpatched tree."""
    copies = []
    for original in (fetched_once.root, fetched_once.upstream, fetched_once.packages):
        copies.append(tmp_path / original.name)
        shutil.copytree(original, copies[-1], symlinks=True)
    return Checkout(copies[0], copies[1], copies[2], fetched_once.commit)


@pytest.fixture
def checkout(fetched: Checkout) -> Checkout:
    """A checkout in which nothing has been fetched."""
    shutil.rmtree(fetched.root / "build")
    return fetched


def times(tree: Path) -> dict[str, int]:
    return {
        str(path.relative_to(tree)): path.stat().st_mtime_ns
        for path in tree.rglob("*")
        if path.is_file() and ".git" not in path.parts
    }


def test_fetches_the_package_and_then_has_nothing_to_do(checkout: Checkout) -> None:
    shutil.rmtree(checkout.upstream)  # the git source is not needed
    checkout.succeed("fetch")
    assert git(checkout.tree, "rev-parse", "HEAD") == checkout.commit
    assert git(checkout.tree, "status", "--porcelain", "--ignored") == ""
    assert os.access(checkout.tree / "run.sh", os.X_OK)
    assert checkout.succeed("verify") == f"{checkout.commit}+unpatched"
    assert not list(checkout.root.rglob("hook-was-run"))
    assert not list((checkout.root / "build" / "upstream").glob(".fetch-*"))
    shutil.rmtree(checkout.packages)
    before = times(checkout.tree)
    checkout.succeed("fetch")
    assert times(checkout.tree) == before


def test_a_package_with_another_hash_is_refused(checkout: Checkout) -> None:
    checkout.pin(sha256="0" * 64)
    assert checkout.fail("fetch").startswith("HashMismatch: ")
    assert not checkout.tree.exists()


@pytest.mark.parametrize(
    ("name", "contents"),
    [
        pytest.param("src/a.cpp", "int a() { return 666; }\n", id="changed"),
        pytest.param("src/added.cpp", "int added;\n", id="added"),
    ],
)
def test_a_packaged_tree_that_is_not_the_commit_is_refused(
    checkout: Checkout, tmp_path: Path, name: str, contents: str
) -> None:
    work = tmp_path / "changed"
    work.mkdir()
    write_package(checkout.upstream, checkout.packages, work, change=(name, contents))
    checkout.pin()  # the package's own hash is right
    error = checkout.fail("fetch")
    assert error.startswith("HashMismatch: ")
    assert name in error
    assert not checkout.tree.exists()


def test_falls_back_to_git(checkout: Checkout) -> None:
    checkout.pin(requirement="no-such-package==1.0")
    checkout.succeed("fetch")
    assert git(checkout.tree, "rev-parse", "HEAD") == checkout.commit


def test_a_commit_that_no_source_has_is_refused(checkout: Checkout) -> None:
    checkout.commit = "1" * 40
    checkout.pin(requirement="no-such-package==1.0")
    error = checkout.fail("fetch")
    assert error.startswith("DownloadFailed: ")
    assert "no-such-package" in error
    assert str(checkout.upstream) in error


def test_no_network_is_named(checkout: Checkout) -> None:
    # A closed port on this machine: nothing can be reached, and nothing leaves it.
    del checkout.environment["PIP_NO_INDEX"], checkout.environment["PIP_FIND_LINKS"]
    checkout.environment |= {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "1", "PIP_TIMEOUT": "2"}
    checkout.pin(url="http://127.0.0.1:9/llama.cpp")
    error = checkout.fail("fetch")
    assert error.startswith("NoNetwork: ")
    assert "tiny-llama" in error
    assert "127.0.0.1:9/llama.cpp" in error


@pytest.mark.parametrize(
    ("command", "tool"),
    [(["fetch"], "git"), (["build"], "cmake"), (["build"], "ninja"), (["build"], "c++")],
)
def test_a_missing_tool_is_named(fetched: Checkout, tmp_path: Path, command: list[str], tool: str) -> None:
    tools = tmp_path / "tools"
    tools.mkdir()
    for each in {"git", "cmake", "ninja", "c++"} - {tool}:
        found = shutil.which(each)
        assert found is not None
        (tools / each).symlink_to(found)
    error = fetched.fail(*command, path=str(tools))
    assert error.startswith("MissingTool: ")
    assert tool in error
    assert "apt-get install" in error


def test_patches_apply_in_order(fetched: Checkout) -> None:
    fetched.patch("0001-first.patch", "src/a.cpp", "return 1", "return 4")
    fetched.succeed("seal")
    fetched.succeed("fetch")
    fetched.patch("0002-second.patch", "src/a.cpp", "return 4", "return 5")
    identity = fetched.succeed("seal")
    assert identity.startswith(f"{fetched.commit}+")
    assert fetched.fail("verify").startswith("WrongTree: ")
    fetched.succeed("fetch")
    assert fetched.succeed("verify") == identity
    assert "return 5" in (fetched.tree / "src" / "a.cpp").read_text()
    assert git(fetched.tree, "log", "--format=%s") == "0002-second\n0001-first\npinned"
    # The identity depends on the order.
    (fetched.patches / "0002-second.patch").rename(fetched.patches / "0000-second.patch")
    assert fetched.succeed("seal") not in (identity, f"{fetched.commit}+unpatched")
    assert fetched.fail("fetch").startswith("PatchFailed: 0000-second.patch does not apply")


def test_only_files_that_differ_are_rewritten(fetched: Checkout) -> None:
    fetched.patch("0001-a.patch", "src/a.cpp", "return 1", "return 4")
    fetched.patch("0002-b.patch", "src/b.cpp", "return 2", "return 6")
    fetched.succeed("seal")
    fetched.succeed("fetch")
    before = times(fetched.tree)
    fetched.patch("0002-b.patch", "src/b.cpp", "return 6", "return 7")
    (fetched.patches / "0002-b.patch").write_text(
        (fetched.patches / "0002-b.patch").read_text().replace("return 6", "return 2")
    )
    changed_by_the_test = times(fetched.tree)
    fetched.succeed("seal")
    fetched.succeed("fetch")
    after = times(fetched.tree)
    assert "return 7" in (fetched.tree / "src" / "b.cpp").read_text()
    assert {name for name in after if after[name] != changed_by_the_test[name]} == {"src/b.cpp"}
    assert after["src/a.cpp"] == before["src/a.cpp"]


def test_removing_all_patches_gives_the_pristine_tree(fetched: Checkout) -> None:
    fetched.patch("0001-a.patch", "src/a.cpp", "return 1", "return 4")
    fetched.succeed("seal")
    fetched.succeed("fetch")
    (fetched.patches / "0001-a.patch").unlink()
    fetched.succeed("seal")
    fetched.succeed("fetch")
    assert git(fetched.tree, "rev-parse", "HEAD") == fetched.commit
    assert "return 1" in (fetched.tree / "src" / "a.cpp").read_text()


def test_patch_files_are_checked_against_their_hashes(fetched: Checkout) -> None:
    fetched.patch("0001-a.patch", "src/a.cpp", "return 1", "return 4")
    error = fetched.fail("fetch")
    assert error.startswith("WrongTree: 0001-a.patch")
    assert "seal" in error
    fetched.succeed("seal")
    fetched.succeed("fetch")
    patch = fetched.patches / "0001-a.patch"
    patch.write_text(patch.read_text().replace("return 4", "return 5"))
    for command in ("fetch", "verify", "status", "check", "build"):
        assert fetched.fail(command).startswith("HashMismatch: ")
    patch.unlink()
    assert fetched.fail("verify").startswith("WrongTree: ")


def test_changes_in_the_tree_are_never_lost(fetched: Checkout) -> None:
    fetched.patch("0001-b.patch", "src/b.cpp", "return 2", "return 6")
    fetched.succeed("seal")
    (fetched.tree / "src" / "a.cpp").write_text("int a() { return 9; }\n")
    (fetched.tree / "src" / "new.cpp").write_text("int c;\n")
    for command in ("fetch", "build"):
        error = fetched.fail(command)
        assert error.startswith(("DirtyTree: ", "WrongTree: "))
    error = fetched.fail("fetch")
    assert error.startswith("DirtyTree: ")
    assert "src/a.cpp, src/new.cpp" in error
    assert (fetched.tree / "src" / "new.cpp").exists()
    fetched.succeed("fetch", "--discard")
    assert "return 1" in (fetched.tree / "src" / "a.cpp").read_text()
    assert "return 6" in (fetched.tree / "src" / "b.cpp").read_text()
    assert not (fetched.tree / "src" / "new.cpp").exists()
    fetched.succeed("verify")


def test_commits_in_the_tree_are_never_lost(fetched: Checkout) -> None:
    (fetched.tree / "src" / "a.cpp").write_text("int a() { return 9; }\n")
    git(fetched.tree, "commit", "--quiet", "--all", "-m", "Mine")
    for command in ("fetch", "verify", "build"):
        error = fetched.fail(command)
        assert error.startswith("WrongTree: HEAD of ")
        assert "export" in error


def test_a_tree_that_is_not_ours_is_left_alone(checkout: Checkout) -> None:
    checkout.tree.mkdir(parents=True)
    (checkout.tree / "thesis.txt").write_text("the only copy")
    assert checkout.fail("fetch").startswith("WrongTree: ")
    assert (checkout.tree / "thesis.txt").exists()


def test_an_interrupted_change_of_the_stack_is_finished(fetched: Checkout) -> None:
    fetched.patch("0001-a.patch", "src/a.cpp", "return 1", "return 4")
    fetched.succeed("seal")
    fetched.succeed("fetch")
    # As a run leaves it that is killed while it rewrites files.
    state = fetched.tree / ".git" / "meshnet-state.json"
    state.write_text(state.read_text().replace('"moving": false', '"moving": true'))
    (fetched.tree / ".git" / "index.lock").touch()
    (fetched.tree / "src" / "a.cpp").write_text("int a() {")
    (fetched.tree / "src" / "b.cpp").unlink()
    assert "half-way" in fetched.fail("verify")
    fetched.succeed("fetch")
    fetched.succeed("verify")
    assert "return 4" in (fetched.tree / "src" / "a.cpp").read_text()


def test_leftovers_of_a_killed_fetch_are_removed(checkout: Checkout) -> None:
    leftover = checkout.root / "build" / "upstream" / ".fetch-abc"
    leftover.mkdir(parents=True)
    half = checkout.root / "build" / "upstream" / f"source-{checkout.commit[:12]}.git"
    half.mkdir()
    partial = checkout.root / "build" / "upstream" / ".llama.cpp.partial"
    partial.mkdir()
    checkout.succeed("fetch")
    checkout.succeed("verify")
    assert not leftover.exists()
    assert not partial.exists()


def test_two_fetches_at_once_take_turns(checkout: Checkout) -> None:
    runs = [
        subprocess.Popen(
            [sys.executable, "native/upstream.py", "fetch"],
            cwd=checkout.root,
            env=checkout.environment,
            stderr=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    errors = [run.communicate(timeout=120)[1] for run in runs]
    assert [run.returncode for run in runs] == [0, 0], errors
    checkout.succeed("verify")


def test_export_writes_commits_as_patches(fetched: Checkout, tmp_path: Path) -> None:
    a, b = fetched.tree / "src" / "a.cpp", fetched.tree / "src" / "b.cpp"
    a.write_text(a.read_text().replace("return 1", "return 4"))
    git(fetched.tree, "commit", "--quiet", "--all", "-m", "Answer: four!\n\nBecause it is more.")
    b.write_text(b.read_text().replace("return 2", "return 6"))
    error = fetched.fail("export")
    assert error.startswith("DirtyTree: src/b.cpp")
    identity = fetched.succeed("export", "--message", "Second")
    assert sorted(path.name for path in fetched.patches.iterdir()) == ["0001-answer-four.patch", "0002-second.patch"]
    assert fetched.succeed("verify") == identity
    b.write_text(b.read_text().replace("return 6", "return 7"))
    amended = fetched.succeed("export", "--amend")
    assert amended != identity
    assert fetched.succeed("export") == amended
    # The same files give the same commits elsewhere.
    head = git(fetched.tree, "rev-parse", "HEAD")
    assert git(fetched.tree, "log", "-1", "--format=%B", "HEAD^") == "Answer: four!\n\nBecause it is more."
    shutil.rmtree(fetched.root / "build")
    fetched.succeed("fetch")
    assert git(fetched.tree, "rev-parse", "HEAD") == head
    assert "return 7" in b.read_text()


def test_export_drops_patches_whose_commits_are_gone(fetched: Checkout) -> None:
    fetched.patch("0001-a.patch", "src/a.cpp", "return 1", "return 4")
    fetched.succeed("seal")
    fetched.succeed("fetch")
    git(fetched.tree, "checkout", "--quiet", "--detach", fetched.commit)
    assert fetched.succeed("export") == f"{fetched.commit}+unpatched"
    assert not list(fetched.patches.iterdir())


def test_rules_for_the_patch_stack(fetched: Checkout) -> None:
    fetched.patch("0001-a.patch", "src/a.cpp", "return 1;", "return 1;\n\n\n\n\n")
    fetched.succeed("seal")
    assert fetched.succeed("check") == "1 patches, 5 of at most 5 added lines"
    fetched.patch("0002-b.patch", "src/b.cpp", "return 2;", "return 3;")
    fetched.succeed("seal")
    assert fetched.fail("check").startswith("PatchFailed: the patch stack adds 6 lines")
    (fetched.patches / "0001-a.patch").unlink()
    fetched.patch("0002-b.patch", "src/models/m.cpp", "return 3;", "return 4;")
    fetched.succeed("seal")
    assert fetched.fail("check").startswith("PatchFailed: 0002-b.patch touches src/models/m.cpp")


def test_bad_pins_name_the_key(checkout: Checkout) -> None:
    pins = checkout.root / "native" / "upstream.toml"
    good = pins.read_text()
    pins.write_text(good.replace("max_added_lines", "maximum"))
    assert "max_added_lines" in checkout.fail("status")
    pins.write_text(good.replace(checkout.commit, "master"))
    assert checkout.fail("status").startswith("BadPins: ")
    pins.write_text(good.replace("[limits]", "[limits"))
    assert checkout.fail("status").startswith("BadPins: ")


NATIVE_BUILD = """
cmake_minimum_required(VERSION 3.20)
project(tiny CXX)
set(CMAKE_RUNTIME_OUTPUT_DIRECTORY "${CMAKE_BINARY_DIR}/bin")
if(NOT TINY_OPTION)
    message(FATAL_ERROR "options of upstream.toml are missing")
endif()
add_subdirectory("${MESHNET_LLAMA_DIR}" llama.cpp EXCLUDE_FROM_ALL)
if(DEFINED MESHNET_BUILD_ID)
    file(GENERATE OUTPUT "${CMAKE_BINARY_DIR}/id.txt" CONTENT "${MESHNET_COMPATIBILITY_ID}\\n${MESHNET_BUILD_ID}\\n")
endif()
"""


def test_builds_with_an_identity_and_rebuilds_only_what_changed(checkout: Checkout) -> None:
    native = checkout.root / "native"
    (native / "CMakeLists.txt").write_text(NATIVE_BUILD)
    (native / "pristine").mkdir()
    (native / "pristine" / "CMakeLists.txt").write_text(NATIVE_BUILD)
    assert checkout.fail("build").startswith("WrongTree: there is no llama.cpp tree")
    checkout.succeed("fetch")
    checkout.patch("0001-a.patch", "src/a.cpp", "return 1", "return 4")
    identity = checkout.succeed("seal")
    checkout.succeed("fetch")
    checkout.succeed("build", "--target", "tool")
    build = checkout.root / "build" / "native"
    compatibility_id, build_id = (build / "id.txt").read_text().splitlines()
    assert compatibility_id == identity
    assert build_id.startswith(f"{identity}+")
    assert "TINY_OPTION=ON" in build_id
    tool = build / ("tool" if (build / "tool").exists() else "bin/tool")
    assert subprocess.run([tool], capture_output=True, text=True, check=True).stdout == "42\n"

    again = checkout.run("build", "--target", "tool")
    assert again.returncode == 0
    assert "no work to do" in again.stdout
    assert "configuring" not in again.stderr

    # Work in progress: refused, unless asked for, and then the identity says so.
    (checkout.tree / "src" / "a.cpp").write_text("int a() { return 7; }\n")
    assert checkout.fail("build").startswith("DirtyTree: ")
    dirty = checkout.run("build", "--dirty", "--target", "tool")
    assert dirty.returncode == 0
    assert "src/b.cpp" not in dirty.stdout
    assert subprocess.run([tool], capture_output=True, text=True, check=True).stdout == "72\n"
    assert (build / "id.txt").read_text().startswith(f"{identity}+dirty-")
    assert git(checkout.tree, "diff", "--cached") == ""
    # Of what the compiler says, only what stops the build is shown.
    warned = "#warning of upstream's own\n"
    (checkout.tree / "src" / "a.cpp").write_text(f"{warned}int a() {{ return 7; }}\n")
    dirty = checkout.run("build", "--dirty", "--target", "tool")
    assert dirty.returncode == 0
    assert "src/a.cpp" in dirty.stdout
    assert "#warning" not in dirty.stdout + dirty.stderr
    (checkout.tree / "src" / "a.cpp").write_text(f"{warned}int a() {{ return }}\n")
    broken = checkout.run("build", "--dirty", "--target", "tool")
    assert broken.returncode == 1
    assert "BuildFailed: ninja failed" in broken.stderr
    assert "expected primary-expression" in broken.stdout

    # The unpatched tree beside it has neither the patch nor the work in progress.
    checkout.succeed("unpatched", "--target", "tool")
    pristine = next((checkout.root / "build" / "upstream-pristine" / "build").rglob("bin/tool"))
    assert subprocess.run([pristine], capture_output=True, text=True, check=True).stdout == "12\n"


def test_a_moved_checkout_still_builds(checkout: Checkout) -> None:
    (checkout.root / "native" / "CMakeLists.txt").write_text(NATIVE_BUILD)
    checkout.succeed("fetch")
    checkout.succeed("build", "--target", "tool")
    moved = checkout.root.with_name("moved")
    checkout.root.rename(moved)
    checkout.root = moved
    checkout.succeed("fetch")
    checkout.succeed("build", "--target", "tool")
