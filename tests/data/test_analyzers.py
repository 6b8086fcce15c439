"""Terms of texts: words of all scripts stay whole, and characters are scikit-learn's."""

import time
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from minidl.data import DataError, HashedTfidf, Tfidf, TfidfOptions


def terms_of(text, **options):
    return TfidfOptions(min_df=1, **options).analyzer.function()(text)


WORDS = [
    "आधुनिक मानक हिन्दी", "ভৌতিক গল্প পড়তে চাইলে", "ప్రధానమంత్రిని కలుసుకున్నారు", "தமிழ் மொழி", "ภาษาไทย ที่นี่", "שָׁלוֹם עוֹלָם",
    "مُحَمَّد كِتَاب", "می\u200cخواهم کتاب\u200cها", "നന്\u200dമ ഞാന്\u200dകൂടി", "x\u0302y ab\u0301\u0323c", "tiếng việt",
    "\U00011107\U00011127\U00011101\U00011134 \U00011013\U00011038", "ゲーム か\u3099き",
]  # fmt: skip


@pytest.mark.parametrize("text", WORDS)
@pytest.mark.parametrize("form", ["NFC", "NFD"])
def test_words_of_all_scripts_stay_whole(text, form):
    """Hindi, Bangla, Telugu, Tamil, Thai, Hebrew, Arabic, Persian and Malayalam with joiners, accents that have no
    composed form, Vietnamese, Chakma and Brahmi, Japanese: decomposed or not, the words are the same."""
    given_text = unicodedata.normalize(form, text)
    for pattern in (TfidfOptions().token_pattern, r"(?u)\b\w\w+\b", r"(\w+)"):
        assert terms_of(given_text, token_pattern=pattern) == unicodedata.normalize("NFC", text).split()


def test_a_pattern_of_a_script_finds_its_marks():
    assert terms_of("हिन्दी and मानक", token_pattern="[\u0900-\u097f]+") == ["हिन्दी", "मानक"]
    assert terms_of("x\u0302 and \u0302 y", token_pattern="[a-z]+") == ["x\u0302", "and", "y"]


def test_what_marks_no_letter_is_no_word():
    text = "\u0301ab \u2764\ufe0f 1\ufe0f\u20e3 \U0001f469\u200d\U0001f52c cd\u200d, \u200cef\U000e0101"
    assert terms_of(text) == ["ab", "cd", "ef\U000e0101"]


@pytest.mark.parametrize("word", ["İSTANBUL", "I\u0307STANBUL", "i\u0307stanbul", "Istanbul", "istanbul"])
def test_a_dotted_capital_i_is_an_i(word):
    assert terms_of(word) == ["istanbul"]


def test_without_nfc_marks_end_words_as_in_scikit_learn():
    assert terms_of("résumé İstanbul", nfc=False) == ["résumé", "stanbul"]
    assert terms_of(unicodedata.normalize("NFD", "résumé"), nfc=False) == ["re", "sume"]


@given(st.text() | st.text(st.sampled_from("aeİIi\u0301\u0307\u0323 \u200dक्\U0001f600é1_")))
def test_canonically_equal_texts_have_the_same_terms(text):
    for unit in ("word", "char", "char_wb"):
        forms = [terms_of(unicodedata.normalize(form, text), unit=unit, ngram_max=2) for form in ("NFC", "NFD")]
        assert forms[0] == forms[1] == terms_of(text, unit=unit, ngram_max=2)


def test_characters_where_no_space_ends_a_word():
    assert terms_of("東京都に行く", unit="char", ngram_min=2, ngram_max=2) == ["東京", "京都", "都に", "に行", "行く"]
    assert terms_of("ab c", unit="char_wb", ngram_min=2, ngram_max=3) == [
        " a",
        "ab",
        "b ",
        " ab",
        "ab ",
        " c",
        "c ",
        " c ",
    ]


@pytest.mark.parametrize(
    "mark", ["\u0301", "\u200d", "\u200da", "a\u200d", "\U0001f600", "\U0001f600\u200d", "\U000e0100"]
)
def test_long_runs_take_linear_time(mark):
    before = time.process_time()
    terms_of("x" + mark * 200_000)
    assert time.process_time() - before < 2


@pytest.mark.parametrize("kind", [Tfidf, HashedTfidf])
def test_what_is_no_list_of_texts_is_one_clear_error(kind):
    options = TfidfOptions(min_df=1, max_features=64)
    fitted = kind.fit(["good film", "bad film"], options)
    for texts, message in (
        ("good film", r"texts is a str, expected a list of texts; write one text as \[text\]"),
        (b"good film", "texts is a bytes, expected a list of texts"),
        (None, "texts is a NoneType, expected a list of texts"),
        (["good", None], "text 1 is a NoneType, expected a str; leave missing texts out, decode bytes"),
        ([float("nan")], "text 0 is a float, expected a str"),
        ([b"good"], "text 0 is a bytes, expected a str"),
    ):
        for use in (fitted.transform, lambda texts: kind.fit(texts, options)):
            with pytest.raises(DataError, match=message):
                use(texts)
    assert fitted.transform(text for text in ("good film", "bad")).shape[0] == 2
