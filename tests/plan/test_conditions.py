"""Conditions of scripts are decided as bash decides them, where the script itself does."""

import subprocess
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trimaran.nouns.noun import TrimaranError
from trimaran.planner.configs.shell import training_words

VALUES = ("", "1", "2", "10", "true", "false")
CONDITIONS = st.one_of(
    st.builds('[ "$A" {} "{}" ]'.format, st.sampled_from(["=", "==", "!="]), st.sampled_from(VALUES)),
    st.builds('[[ $B {} "{}" ]]'.format, st.sampled_from(["==", "!="]), st.sampled_from(VALUES)),
    st.builds("[ $N {} {} ]".format, st.sampled_from(["-eq", "-ne", "-gt", "-ge", "-lt", "-le"]), st.integers(0, 3)),
    st.builds('[ {} "$A" ]'.format, st.sampled_from(["-n", "-z", "", "! -n", "! ! -z"])),
    # a value that is empty and not quoted is no word of `[`
    st.builds("[ $B {} 1 ]".format, st.sampled_from(["=", "!="])),
    st.builds(
        "{} {} $B {}".format,
        st.just("[["),
        st.sampled_from(["-n", "-z", "", "! -z", "! ! ! -n", "1 ==", "! 1 !="]),
        st.just("]]"),
    ),
    st.builds("[ {} $B ]".format, st.sampled_from(["-n", "-z", "", "! -n", "!"])),
    st.sampled_from(["true", "false"]),
)
ASSIGNED = st.builds("{}={}".format, st.sampled_from(["A", "B"]), st.sampled_from(VALUES)) | st.builds(
    "OUT+=' --{}'".format, st.sampled_from(["a", "b", "c", "d"])
)


LINKS = st.sampled_from(["&&", "||"])
# Commands that are run or not by how the one before them ended, and branches by patterns.
LISTED = st.one_of(
    st.builds("{} {} {}".format, CONDITIONS, LINKS, ASSIGNED),
    st.builds("{} {}\n {} {} {}".format, CONDITIONS, LINKS, ASSIGNED, LINKS, ASSIGNED),
    st.builds("{} {} {} {} {}".format, CONDITIONS, LINKS, CONDITIONS, LINKS, ASSIGNED),
    st.builds("{} {} {{ {}; {}\n}}".format, CONDITIONS, LINKS, ASSIGNED, ASSIGNED),
    st.builds(
        "case {} in\n1|2) {} ;;\n(tr*) {};;\n'10')\n{}\n;;\n*) {}\nesac".format,
        st.sampled_from(["$A", '"$B"', "$N"]), ASSIGNED, ASSIGNED, ASSIGNED, ASSIGNED,
    ),
    st.builds("case $A in 1) {};; true) {} ;; esac".format, ASSIGNED, ASSIGNED),
    st.builds("{} {} if {}; then {}\nelse {}; fi".format, CONDITIONS, LINKS, CONDITIONS, ASSIGNED, ASSIGNED),
    st.builds("{} {} case $A in 1) {};; *) {} ;; esac".format, CONDITIONS, LINKS, ASSIGNED, ASSIGNED),
)  # fmt: skip


def _branched(inner: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    tail = st.one_of(
        st.just(""),
        st.builds("else\n{}\n".format, inner),
        st.builds("elif {}; then\n{}\nelse\n{}\n".format, CONDITIONS, inner, inner),
    )
    return st.builds("if {}; then\n{}\n{}fi\n{}".format, CONDITIONS, inner, tail, inner)


SCRIPTS = st.recursive(st.lists(ASSIGNED | LISTED, min_size=1, max_size=3).map("\n".join), _branched, max_leaves=8)
TELLING = dict.fromkeys(["--a", "--b", "--c", "--d"])


@settings(max_examples=150)
@given(script=SCRIPTS, n=st.integers(0, 3))
def test_branches_are_those_of_bash(script: str, n: int) -> None:
    script = f"OUT='train --a'\nA=1\nB=true\nN={n}\n{script}\n"
    ran = subprocess.run(["bash", "-c", f'{script}printf %s "$OUT"'], capture_output=True, text=True, check=True)
    words, undecided = training_words(f"{script}$OUT\n", TELLING)
    assert words == ran.stdout.split()
    assert not undecided


@pytest.mark.parametrize(
    ("lines", "words", "undecided"),
    [
        ("S=0\n[ $S -eq 1 ] && OUT+=' --b'", "", False),
        ("[ -f x ] && OUT+=' --b'", "--b", True),
        ("[ -f x ] && { OUT+=' --b'; OUT+=' --c'; }", "--b --c", True),
        ("[ $1 = 1 ] || OUT+=' --b'", "--b", True),
        ("mkdir x && OUT+=' --b'", "--b", False),
        ("[ -f x ] && if true; then OUT+=' --b'; else OUT+=' --c'; fi\nOUT+=' --d'", "--b --d", True),
        ("[ 1 = 2 ] && for i in 1 2; do OUT+=' --b'; done\nOUT+=' --d'", "--d", False),
        ("[[ -n $S && $S = 1 ]] && OUT+=' --b'", "--b", True),
        ("if [[ $1 = 1 || $1 = 2 ]]; then OUT+=' --b'; fi", "--b", True),
        ("test 1 = 2 && OUT+=' --b'", "", False),
        ("case $1 in 1) OUT+=' --b' ;; *) OUT+=' --c' ;; esac", "--b --c", True),
        ("S=7b\ncase $S in 7b) OUT+=' --b' ;; 13b) OUT+=' --c' ;; esac", "--b", False),
        ("if [ -f x ]; then OUT+=' --b'; elif true; then OUT+=' --c'; else OUT+=' --d'; fi", "--b --c", True),
        ('declare -a MORE=(--b --c)\nOUT+=" ${MORE[*]}"', "--b --c", False),
    ],
)
def test_what_a_command_before_it_or_a_pattern_decides_is_run_as_bash_runs_it(
    lines: str, words: str, undecided: bool
) -> None:
    assert training_words(f"OUT='train --a'\n{lines}\n$OUT\n", TELLING) == (
        ["train", "--a", *words.split()], undecided,
    )  # fmt: skip


def test_a_branch_after_one_that_may_be_taken_is_not_sure_either() -> None:
    script = "T=2\nif [ -f x ]; then T=2; elif true; then T=$1; fi\ntrain --a $T\n"
    assert training_words(script, TELLING) == (["train", "--a", "2"], True)


@pytest.mark.parametrize(
    "condition",
    [
        '[ "$1" = x ]',
        "[ -f data.bin ]",
        '[ "$A" = 1 ] && [ -f data.bin ]',
        "! [ $A = 1 ]",
        "grep -q x y",
        "[[ $A == 1* ]]",
    ],
)
def test_of_what_only_a_shell_can_tell_each_branch_is_taken(condition: str) -> None:
    script = f"A=1\nOUT='train --a'\nif {condition}; then OUT+=' --b'; else OUT+=' --c'; fi\n$OUT\n"
    assert training_words(script, TELLING) == (["train", "--a", "--b", "--c"], True)


def test_a_branch_adds_to_words_of_which_some_are_not_known() -> None:
    script = 'OUT="--a --save run-$(hostname)"\nif [ -f x ]; then\nOUT="${OUT} --b"\nfi\ntrain $OUT\n'
    words, undecided = training_words(script, TELLING)
    assert (words[0], words[1], words[-1], undecided) == ("train", "--a", "--b", True)


@pytest.mark.parametrize(
    "where", ["> log.txt", "2>&1 | tee log.txt", "&> log.txt", ">>log.txt 2>err.txt", "< /dev/null"]
)
def test_where_output_goes_is_no_value(where: str) -> None:
    assert training_words(f"train --a --b 2 {where}\n", TELLING)[0] == ["train", "--a", "--b", "2"]


def test_a_quoted_value_is_no_redirection() -> None:
    assert training_words("train --a '<s>' --b \">x\"\n", TELLING)[0] == ["train", "--a", "<s>", "--b", ">x"]


@pytest.mark.parametrize(
    "words",
    [
        ": ${NEW:=4}\ntrain --a $NEW", 'train --a "${NEW:=4}" --b ${NEW}', "train --a ${EMPTY:-4} --b ${EMPTY-4}",
        ": ${EMPTY:=4}\ntrain --a $EMPTY", "train --a ${SET:+--b $SET} --c ${SET+x}", "train --a ${EMPTY:+x}",
        "train --a ${LIST[1]} --b ${LIST[0]}", "train --a ${LIST[9]:-4} --b ${SET[0]}", 'train --a "${LIST[@]}"',
        "train --a ${LIST[*]:+x} --b $((SET * 2))",
    ],
)  # fmt: skip
def test_variables_are_filled_in_as_bash_does(words: str) -> None:
    script = f"SET=8\nEMPTY=\nLIST=(16 32 64)\n{words}\n"
    shown = f"train() {{ printf '%s\\n' train \"$@\"; }}\n{script}"
    ran = subprocess.run(["bash", "-c", shown], capture_output=True, text=True, check=True)
    assert training_words(script, TELLING)[0] == ran.stdout.split("\n")[:-1]


@pytest.mark.parametrize("again", ["eval $RUN", 'bash -c "$RUN"'])
def test_a_script_that_runs_itself_ends_in_a_line(again: str) -> None:
    with pytest.raises(TrimaranError, match="more than 20 deep in each other"):
        training_words(f"RUN='{again}'\n{again}\n", TELLING)
    with pytest.raises(TrimaranError, match="more than 262144 characters"):
        training_words("A='--a'\n" + 'eval A=\\"$A $A\\"\n' * 30 + "train $A\n", TELLING)


def test_what_eval_is_given_is_followed() -> None:
    script = 'RUN="train --a --b 2 &> $(date).log"\necho ${RUN}\neval ${RUN}\n'
    assert training_words(script, TELLING)[0] == ["train", "--a", "--b", "2"]


def test_a_condition_denied_as_often_as_no_person_would_is_decided_too() -> None:
    script = f"A=1\nOUT='train --a'\nif [ {'! ' * 200_001}-n \"$A\" ]; then OUT+=' --b'; else OUT+=' --c'; fi\n$OUT\n"
    assert training_words(script, TELLING) == (["train", "--a", "--c"], False)


@pytest.mark.parametrize(
    "document",
    [
        "cat <<END > x\n--b it's\nEND",
        "cat <<-'END'\n\t--b\n\tEND\ncat << EOF\n<<END\nEOF",
        "cat <<END | tee x\nEND2\nEND",
    ],
)
def test_a_here_document_is_no_command(document: str) -> None:
    assert training_words(f"A='--a'\n{document}\ntrain $A\n", TELLING)[0] == ["train", "--a"]


def test_many_here_documents_without_an_end_are_read_at_once() -> None:
    """Each was looked through to the end of the file for its own: half a MiB of them took minutes."""
    started = time.monotonic()
    assert training_words("train --a\n" + "<<b\n" * 2**17, TELLING)[0] == ["train", "--a"]
    assert time.monotonic() - started < 30
