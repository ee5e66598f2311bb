"""The wording of arithmetic problems: templates of nouns and places, and the sentences made of them."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

from leank.data_gen.gsm.graph import Definition, Quantity


@dataclass(frozen=True)
class Template:
    """The words of a template."""

    kinds: tuple[str, str]  # first and second words of a kind, each separated by commas; a blank joins them
    places: tuple[str, str]  # first and second parts of a place, each separated by commas; nothing joins them
    average: str  # average, total, grand: how a quantity of that form is called, with {kind} and {place}
    total: str
    grand: str

    def names(self) -> tuple[list[str], list[str]]:
        """Return all kinds and all places."""
        kinds = [f"{a} {b}" for a, b in product(self.kinds[0].split(","), self.kinds[1].split(","))]
        return kinds, [a + b for a, b in product(self.places[0].split(","), self.places[1].split(","))]

    def name(self, q: Quantity) -> str:
        """Return what a quantity is called inside a sentence."""
        forms = {"total": self.total, "grand": self.grand, "average": self.average}
        return forms.get(q.what, "the number of {kind} in {place}").format(kind=q.kind, place=q.place)

    def subject(self, q: Quantity) -> str:
        """Return what a quantity is called at the start of a sentence."""
        name = self.name(q)
        return name[0].upper() + name[1:]

    def sentence(self, q: Quantity, made: Definition) -> str:
        """Return the statement of a definition."""
        names = [self.name(r) for r in made.refs]
        if not names:
            return f"{self.subject(q)} equals {made.constant}."
        if made.difference:
            text = f"the difference between {names[0]} and {names[1]}"
        elif len(names) > 1:
            text = "the sum of " + ", ".join(names[:-1]) + ("," if len(names) > 2 else "") + f" and {names[-1]}"
        else:
            text = names[0]
        if made.constant is not None:
            text = f"{made.constant} {'times' if made.times else 'plus'} {text}"
        return f"{self.subject(q)} equals {text}."


TEMPLATES = {
    "crazy_zootopia": Template(
        ("adult", "lynx,badger,otter,ibis,gecko,heron,tortoise,lemur,beaver,moose,hare,seal,whale,swan,goose,duck,frog,"
         "toad,newt,snake,lizard,camel,goat,sheep,horse,pony,mouse,bat,mole,hedgehog,shark,trout,salmon,crab,spider,"
         "beetle,ant,moth,falcon,stork"),
        ("Amber,Birch,Cobalt,Dawn,Ember,Fern,Garnet,Hazel,Indigo,Juniper,Kestrel,Lark",
         " Hollow, Ridge, Marsh, Grove, Bay, Meadow, Canyon, Reserve"),
        "the average number of newborn children per {kind} in {place}", "the total number of adult animals in {place}",
        "the total number of newborn animal children in {place}",
    ),
    "teachers_in_school": Template(
        ("evening,weekend,bilingual,rural,coastal,charter,northern,southern,technical,preparatory",
         "drama school,nursing school,trade school,primary school,music school,sailing school,law school,"
         "farming school,language school,art school"),
        ("Alder,Brook,Cedar,Dover,Elm,Fairview,Glen,Harbor,Iron,Jasper,Kings,Lime",
         "ton,field,ford,haven,gate,mount,stead,wick"),
        "the average number of teachers per {kind} in {place}", "the total number of schools in {place}",
        "the total number of teachers from all schools in {place}",
    ),
    "movie_festival_awards": Template(
        ("silent,animated,black-and-white,epic,low-budget,musical,wordless,historical,experimental,seaside",
         "heist movie,ghost story,courtroom drama,sports movie,road comedy,spy thriller,family saga,war drama,"
         "nature film,space opera"),
        ("Silver,Lantern,Harvest,Winter,Harbour,Mosaic,Comet,Orchard,Velvet,Copper,Monsoon,Prairie",
         " Reel Festival, Screen Days, Film Week, Cinema Fair, Picture Gala, Short Cuts, Premieres, Biennale"),
        "the average number of nominations per {kind} in {place}", "the total number of movies in {place}",
        "the total number of movie nominations from all movies in {place}",
    ),
}  # fmt: skip
