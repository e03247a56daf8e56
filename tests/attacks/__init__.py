"""The attacks: which tests show each, what each of these must end in, and the unattacked twin beside it.

A test is named by its file and function, with a case in brackets where the others are about something else. It says
what it ended in by the fixture `ends`, which compares that with this table; so nothing is shown but what was found.
"""

from typing import NamedTuple


class Attack(NamedTuple):
    """tests: test → what it must end in; twin: the test that shows the same unattacked."""

    name: str
    tests: dict[str, str]
    twin: str


NO_MATCH, INPUT_FAULT, REFUSED = "no-match (10)", "input-fault (11)", "refused (13)"
FORGED = "CertificateFault (11)"
TWINS = {
    "test_trainers.py::test_the_unattacked_twin_matches": "match (0)",
    "test_pieces.py::test_every_piece_of_the_unattacked_twin_matches": "match (0)",
    "test_ledgers.py::test_the_unattacked_twin_is_whole": "match (0)",
    "test_certificates.py::test_the_unattacked_twins_are_genuine": "match (0)",
    "test_draws.py::test_the_unattacked_night": "nothing against the run (0)",
}
TRAINER, PIECES, LEDGER, CERTIFICATE, NIGHT = TWINS
_CHEAT = "test_trainers.py::test_a_cheat_is_found_and_narrowed"
_GROUND = "test_draws.py::test_heads_ground_after_the_beacon"
_CHAIN = "test_ledgers.py::test_a_ledger_that_is_no_chain"

ATTACKS = [
    Attack(
        "a data window swapped in one step, with honest compute",
        {f"{_CHEAT}[the data of the first unit swapped]": NO_MATCH},
        TRAINER,
    ),
    Attack(
        "weights spliced from a twin run", {"test_trainers.py::test_weights_spliced_from_a_twin_run": NO_MATCH}, TRAINER
    ),
    Attack(
        "a small integer added to one weight's summed gradient",
        {f"{_CHEAT}[a small integer added to a gradient]": NO_MATCH},
        TRAINER,
    ),
    Attack(
        "one unit's data swapped, and the step opened so",
        {
            f"{_CHEAT}[the data of the second unit swapped]": NO_MATCH,
            "test_pieces.py::test_each_cheat_is_caught_by_its_piece_and_no_other[one unit's data swapped]": (
                "unit 1 no-match (10), all others match"
            ),
        },
        PIECES,
    ),
    Attack(
        "a ledger with a duplicate, a reorder, a truncation, an edited float",
        {
            _CHAIN: INPUT_FAULT,
            "test_ledgers.py::test_an_edited_float_that_was_linked_and_signed_anew": NO_MATCH,
        },
        LEDGER,
    ),
    Attack(
        "two ledgers for one run",
        {
            "test_ledgers.py::test_two_ledgers_for_one_run": FORGED,
            "test_draws.py::test_two_ledgers_for_one_run": "two histories (11)",
        },
        NIGHT,
    ),
    Attack(
        "heads ground after the beacon",
        {
            _GROUND: "no witness: refused (13)",
            f"{_GROUND}_beside_the_witnessed_one": "two statements, dropped (11)",
        },
        NIGHT,
    ),
    Attack(
        "a draw with a missing or wrong round",
        {"test_draws.py::test_a_draw_with_a_missing_or_wrong_round": "dropped (11)"},
        NIGHT,
    ),
    Attack("a redraw", {"test_draws.py::test_a_redraw": "two statements, dropped (11)"}, NIGHT),
    Attack("a dropped unfavourable draw", {"test_draws.py::test_a_dropped_unfavourable_draw": "dropped (11)"}, NIGHT),
    Attack(
        "a night called missed after its beacon",
        {"test_draws.py::test_a_night_called_missed_after_its_beacon": "called missed, dropped (11)"},
        NIGHT,
    ),
    Attack(
        "a certificate moved to another step, run or key",
        {
            "test_certificates.py::test_moved_to_another_step": FORGED,
            "test_certificates.py::test_moved_to_another_run": FORGED,
            "test_certificates.py::test_moved_to_another_key": FORGED,
        },
        CERTIFICATE,
    ),
    Attack(
        "a certificate signed without a replay",
        {"test_certificates.py::test_signed_without_a_replay": FORGED},
        CERTIFICATE,
    ),
    Attack("two keys of one person", {"test_draws.py::test_two_keys_of_one_person": "attested, not confirmed"}, NIGHT),
    Attack(
        "a hostile file in every position: pickle, bombs, giant header, path, link",
        {
            "test_hostile.py::test_a_hostile_file": INPUT_FAULT,
            "test_hostile.py::test_a_link_pipe_or_folder_in_place_of_a_file": INPUT_FAULT,
            "test_hostile.py::test_a_release_that_names_files_outside": INPUT_FAULT,
            "test_hostile.py::test_a_hostile_opening": INPUT_FAULT,
            "test_hostile.py::test_a_hostile_record": "told, and counts for nothing",
            "test_hostile.py::test_a_hostile_file_that_a_person_names": INPUT_FAULT,
        },
        LEDGER,
    ),
    Attack("corruption of the same size", {"test_ledgers.py::test_corruption_of_the_same_size": INPUT_FAULT}, LEDGER),
    Attack("an audit without a target", {"test_ledgers.py::test_an_audit_without_a_target": REFUSED}, LEDGER),
    Attack(
        "an audit on a backend that fails its vectors",
        {"test_ledgers.py::test_a_backend_that_fails_its_vectors": "machine-fault (12)"},
        LEDGER,
    ),
    Attack(
        "a trainer that skips one optimizer update",
        {
            f"{_CHEAT}[an update left out]": NO_MATCH,
            "test_pieces.py::test_each_cheat_is_caught_by_its_piece_and_no_other[an update left out]": (
                "update no-match (10), all others match"
            ),
        },
        TRAINER,
    ),
    Attack(
        "a learning rate off by one ulp",
        {
            f"{_CHEAT}[a rate off by one]": NO_MATCH,
            "test_trainers.py::test_a_recorded_rate_off_by_one_needs_no_replay": NO_MATCH,
        },
        TRAINER,
    ),
]
VERDICTS = TWINS | {test: verdict for attack in ATTACKS for test, verdict in attack.tests.items()}


def test_of(nodeid: str) -> str:
    """The test in VERDICTS that a node of pytest's runs; "" for none."""
    file, _, name = nodeid.partition("::")
    test = f"{file.removeprefix('tests/attacks/')}::{name}"
    return next((each for each in (test, test.partition("[")[0]) if each in VERDICTS), "")
