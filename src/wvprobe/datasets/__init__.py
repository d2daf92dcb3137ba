"""Labelled text: words in sentences, each with its sense, its part of speech, its entity ...

    senses = load_senses()                       # the bundled set, written for this project
    senses = load_senses("homonyms_en.csv")      # or a file or folder of a known format
    senses.only("bank").to_frame()

    treebank = load_conllu("en_ewt-ud-dev.conllu")          # parts of speech; column= for others
    entities = load_iob2("en_ewt-ud-dev.iob2")
    own = load_labels("labels.csv")                         # sentence,word,label
    texts = load_texts("texts.txt")                         # one a line

Formats of senses: ``senses`` (the bundled set's columns), ``homonyms`` (paired sentences, two
senses a row), ``coarsewsd`` (a folder of CoarseWSD-20, Loureiro et al. 2021) and ``wic`` (pairs
judged same or different, Pilehvar & Camacho-Collados 2019). :mod:`wvprobe.labelled` finds the
tokens of labelled words.
"""

from wvprobe.datasets._conllu import load_conllu as load_conllu
from wvprobe.datasets._iob2 import load_iob2 as load_iob2
from wvprobe.datasets._labels import LabelledDataset as LabelledDataset
from wvprobe.datasets._labels import LabelledSentence as LabelledSentence
from wvprobe.datasets._labels import Skipped as Skipped
from wvprobe.datasets._labels import labelled_senses as labelled_senses
from wvprobe.datasets._prose import PROSE_GENRES as PROSE_GENRES
from wvprobe.datasets._prose import PROSE_SPLITS as PROSE_SPLITS
from wvprobe.datasets._prose import load_prose as load_prose
from wvprobe.datasets._sense_files import FORMATS as FORMATS
from wvprobe.datasets._sense_files import load_senses as load_senses
from wvprobe.datasets._sense_files import senses_or_bundled as senses_or_bundled
from wvprobe.datasets._senses import SenseDataset as SenseDataset
from wvprobe.datasets._senses import SenseItem as SenseItem
from wvprobe.datasets._tables import load_labels as load_labels
from wvprobe.datasets._texts import load_texts as load_texts
