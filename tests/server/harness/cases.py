"""Questions with short answers that differ in length, drafting and sampling."""

LIST = """Copy this list of parts, one line for each part, and do not change a word:

part: aluminium bracket, 40 mm, left side, drawing 7741-A
part: aluminium bracket, 40 mm, right side, drawing 7741-B

part: aluminium bracket"""

SYSTEM = (
    "You are the clerk of a small parts store. Answer in one short sentence, in plain words, and name the shelf. "
    "The store has these shelves. Shelf one holds brackets of aluminium in 20, 40 and 60 mm. Shelf two holds "
    "hinges of stainless steel in 25 and 35 mm, left and right. Shelf three holds screws with flat, round and "
    "hexagonal heads, from M2 to M12, by the hundred. Shelf four holds washers and nuts for those screws. Shelf "
    "five holds wooden dowels, glue and sandpaper. Shelf six holds paint in white, grey, black and signal red. "
    "Nothing on shelf six may be given out without gloves. Everything that is not on a shelf has to be ordered "
    "and takes three working days; say so when someone asks for it. "
)

QUESTIONS = ["Where are the M4 screws?", "I need a hinge.", "Is there blue paint?", "What is on shelf one?"]

# Draft length, then options. Each pair names one expected answer; the draft length must not change it.
CASES = [
    (None, dict(text_input="The capital of France is", max_tokens=16)),
    (0, dict(text_input="Once upon a time", max_tokens=12)),
    (8, dict(text_input=LIST, max_tokens=40)),
    (4, dict(text_input=LIST, max_tokens=33, temperature=0.7, seed=7)),
    (1, dict(text_input="1, 2, 3, 4, 1, 2, 3, 4, 1, 2,", max_tokens=20, temperature=1.0, seed=1)),
    (2, dict(text_input="Rain in the mountains", max_tokens=14, temperature=1.2, top_k=20, seed=2**64 - 1)),
    (3, dict(text_input="def add(a, b):\n    return", max_tokens=18, temperature=0.9, top_p=0.8, seed=0)),
    (5, dict(text_input="a b c a b c a b", max_tokens=9, temperature=1.0, min_p=0.05, seed=3)),
    (6, dict(text_input="Ein Fluß fließt über den Berg. Ein Fluß", max_tokens=15, repetition_penalty=1.2)),
    (7, dict(text_input="日本の首都は", max_tokens=12, presence_penalty=0.5, frequency_penalty=0.3)),
    (None, dict(text_input="x", max_tokens=1)),
    (None, dict(text_input="The end. The end. The end.", max_tokens=24, stop_words=[" end"], temperature=1.0, seed=5)),
    (8, dict(text_input="Name a fruit:", max_tokens=16, bad_words=[" apple", " banana"], min_tokens=4)),
    (None, dict(text_input="yes yes yes yes", max_tokens=22, ignore_eos=True, top_k=5, temperature=1.0, seed=11)),
]


def options(case):
    """A case as the options of a request."""
    draft_len, asked = case
    return asked if draft_len is None else {**asked, "num_draft_tokens": draft_len}


def name(case):
    draft_len, asked = case
    kind = "greedy" if not asked.get("temperature") else f"seed{asked['seed']}"
    return f"{asked['text_input'][:8].strip()!r}-{kind}-draft{'auto' if draft_len is None else draft_len}"
