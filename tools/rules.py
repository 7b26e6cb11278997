#!/usr/bin/env python3
"""The rules of tools/lint that need no compiler: what a line of source may not say, and where.

Reads the files that git tracks or would track, prints one line for each breach, and exits 1 if there is any.
"""
import pathlib
import re
import subprocess
import sys

# std::abort() and its like; a class may have a member of that name, which takes a reason.
ENDING = re.compile(r"(?<![\w.>:])(?:(?:std::|::)(\w*exit|_Exit|abort|terminate)\s*\(|(?<!void )(_?exit|_Exit|quick_exit)\s*\("
                    r"|(?<!void )(abort|terminate)\s*\(\s*\))")
ENVIRONMENT = re.compile(r"\b(?:(?:secure_)?getenv|setenv|putenv|unsetenv|environ)\b")
PRINTING = re.compile(r"\b(?:std::c(?:out|err|log)|v?f?printf|f?puts|f?putc|putchar|perror|stdout|stderr|STD(?:OUT|ERR)_FILENO)\b")
FORKING = "tests/support/forked.hpp"  # a forked process has no other end
ABORTING = "runtime/comm/nccl/nccl_abort.cpp"  # kernels hang on the GPU: no exception ends them, and who blocks on it waits for ever
LIBRARY = ("include", "runtime", "kernels", "nn")
SPEAKING = "runtime/run/"  # the layer of mains
EMPTY_CATCH = re.compile(r"\bcatch\s*\([^)]*\)\s*\{\s*\}")
VENDOR = re.compile(r'^[ \t]*#[ \t]*include[ \t]*[<"]((?:cuda|cublas|cudnn|nccl|mpi|hip|Eigen/|nlohmann/|xxhash|asio)[^>"]*)[>"]', re.MULTILINE)
OF_TESTS = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"tests/', re.MULTILINE)
CASE = re.compile(r"^(?:TEST_CASE|TEMPLATE_(?:LIST_)?TEST_CASE|SCENARIO)\b", re.MULTILINE)
# A macro, or a helper whose name says that it asserts.
ASSERTION = re.compile(r"\b\w*(?:CHECK|REQUIRE|FAIL|assert|check|expect|require|verify)\w*\s*(?:<[^;()]*>)?\(")
HELPER = re.compile(r"^\w[^;{}=]*?\b(\w+)\([^;{}]*\{\n(.*?)^\}", re.MULTILINE | re.DOTALL)
UNFINISHED = re.compile("|".join(rf"\b{word}\b" for word in ("TO" + "DO", "FIX" + "ME", "XX" + "X")))
PROSE_COLUMNS = 140  # wrapped at 130; tables, code and pictures are as wide as they are
GLOSSARY = "include/tessera/README.md"
MOST_WORDS, MOST_WORDS_OF_THE_FIRST_PAGE = 1200, 1000  # of a README, outside its tables and code: lines would only become longer
ROW = re.compile(r"^\| (?!word \||---)(.*) \|$", re.MULTILINE)
ONE_SENTENCE = re.compile(r"(?:[^.]|\.(?!\s))*\.")
FENCED = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
WIDE = re.compile(rf"^(?!\||\s*$).{{{PROSE_COLUMNS + 1},}}$", re.MULTILINE)
LITERAL = re.compile(r'//[^\n]*|/\*.*?\*/|R"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|\'(?:\\.|[^\'\\\n])+\'', re.DOTALL)


def words_of(prose):
    return sum(len(line.split()) for line in prose.splitlines() if not line.startswith("|"))


def without_literals(content):
    """The code alone: comments and strings blanked, so that every position and line stays."""
    return LITERAL.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), content)


def breaches(path, content):
    """(position, message) of everything that `path` may not contain."""
    folder = path.split("/")[0]
    for match in UNFINISHED.finditer(content):
        yield match.start(), f"unfinished: {match.group(0)}"
    if path.endswith("README.md"):
        prose = FENCED.sub(lambda match: re.sub(r"[^\n]", " ", match.group(0)), content)  # blank, and every position stays
        for match in WIDE.finditer(prose):
            yield match.start(), f"prose of {len(match.group(0))} columns; wrap it at 130"
        if path == GLOSSARY:
            for match in ROW.finditer(content, content.index("## Glossary")):
                cells = [cell.strip() for cell in match.group(1).split("|")]
                if len(cells) != 3 or not all(cells) or not ONE_SENTENCE.fullmatch(cells[1]):
                    yield match.start(), "a word has one sentence, and PyTorch's word or 'none' beside it"
        words, most = words_of(prose), MOST_WORDS_OF_THE_FIRST_PAGE if path == "README.md" else MOST_WORDS
        if words > most:
            yield 0, f"{words} words outside tables and code, of at most {most}"
    if not path.endswith((".hpp", ".cpp", ".cu")):
        return
    code = without_literals(content)
    if folder != "tools" and not path.startswith("runtime/run/") and path not in (FORKING, ABORTING):
        for match in ENDING.finditer(code):
            if folder == "tests" and match.group(match.lastindex) == "_exit":
                continue  # of a child that a test has forked
            yield match.start(), f"{match.group(match.lastindex)}() ends the process; the library throws, and only tools/ and runtime/run/ end"
    if folder in LIBRARY and not path.startswith(SPEAKING):
        for match in ENVIRONMENT.finditer(code):
            yield match.start(), f"{match.group(0)}: below runtime/run the library leaves the environment alone; take an option"
        for match in PRINTING.finditer(code):
            yield match.start(), f"{match.group(0)}: below runtime/run the library never prints; log to the sink"
    if folder in LIBRARY:
        for match in OF_TESTS.finditer(content):
            yield match.start(), "the library includes nothing of tests/"
    for match in EMPTY_CATCH.finditer(code):
        yield match.start(), "an empty catch hides a failure"
    if folder == "include":
        for match in VENDOR.finditer(content):
            yield match.start(), f"a public header may not include a vendor's header ({match.group(1)})"
    if path.startswith("tests/") and path.endswith("_test.cpp"):
        cases = [match.start() for match in CASE.finditer(code)]
        if not cases:
            yield 0, "a test file without a test case"
        asserting = [re.escape(name) for name, body in HELPER.findall(code) if ASSERTION.search(body)]
        calls = re.compile(rf"\b(?:{'|'.join(asserting)})\s*[<(]") if asserting else ASSERTION
        for begin, end in zip(cases, cases[1:] + [len(code)]):
            if not ASSERTION.search(code, begin, end) and not calls.search(code, begin, end):
                yield begin, "a test case without an assertion cannot fail"


def unexplained(path, content, paths):
    """Sources of the library's bodies that the README of their folder does not name."""
    folder = path.removesuffix("README.md")
    if not path.endswith("README.md") or not folder.startswith("runtime/"):
        return
    beside = [pathlib.PurePath(p) for p in paths if p.startswith(folder) and "/" not in p.removeprefix(folder)]
    for stem in dict.fromkeys(p.stem for p in beside if p.suffix in (".hpp", ".cpp")):
        if not re.search(rf"\b{stem}\b", content):
            yield 0, f"does not say what {stem} is"


def main():
    root = pathlib.Path(__file__).resolve().parent.parent
    listing = subprocess.run(["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"], cwd=root,
                             check=True, capture_output=True, text=True).stdout
    count = 0
    paths = sorted(path for path in set(listing.split("\0")) if (root / path).is_file())
    for path in paths:
        try:
            content = (root / path).read_text()
        except UnicodeDecodeError:
            continue  # data
        for position, message in [*breaches(path, content), *unexplained(path, content, paths)]:
            print(f"{path}:{content.count(chr(10), 0, position) + 1}: {message}")
            count += 1
    return 1 if count else 0


if __name__ == "__main__":
    sys.exit(main())
