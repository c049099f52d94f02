"""The requests of `kvferry demo`: five people, for two servers with two slots each.

The script has four habits of real clients:

- turns of one conversation that arrive at another server;
- a second request while the first still streams;
- several conversations with one system prompt;
- more conversations than slots.
"""

from dataclasses import dataclass, field

HARBOUR = """\
You are the assistant of the harbour office of Nordholm. You answer questions of passengers and \
skippers. Be brief and polite; give times in the 24-hour format and prices in crowns. If you do \
not know something, say so and name the telephone number of the office, 555 0142.

Ferries. The ferry Aurora crosses to Sandvik at 06:30, 09:00, 11:30, 14:00, 16:30 and 19:00, and \
comes back 75 minutes later; the crossing takes 40 minutes. On Sundays the first and the last \
crossing are left out. The ferry Borealis goes to the islands Lille and Store Skarv at 08:15 and \
15:45, on weekdays only, from the first of May to the last day of September. In a storm above \
wind force nine no ferry sails; tickets then stay valid for seven days.

Tickets. Adults pay 62 crowns, children under twelve 31, children under four nothing. A bicycle \
costs 15 crowns, a motorcycle 48, a car up to five metres 140, each further metre 35. Return \
tickets are ten percent cheaper and valid for thirty days. Groups of ten and more get a fifth off \
if they book two days ahead. Tickets are sold at the pier until five minutes before departure, \
and by telephone. Lost tickets are not replaced.

Luggage and animals. Each passenger may take two pieces of up to twenty kilograms. Dogs travel \
free on a leash on the outer deck; cats and birds stay in a basket. Horses need a trailer, a \
veterinary certificate and a place booked the day before. Fuel cans, gas bottles and fireworks \
are not taken on board.

Berths for guests. The basin has forty berths. Boats up to eight metres pay 120 crowns a night, \
up to twelve metres 190, longer ones 260; water and showers are included, electricity is paid by \
meter at 4 crowns a kilowatt-hour. Berths 1 to 12 are kept for fishing boats between 04:00 and \
10:00. Arrivals after 22:00 moor at the outer quay and report in the morning. Speed in the basin \
is three knots. Waste oil goes into the red tank behind the ice house, never into the water.

The office is open from 07:00 to 18:00, on Sundays from 09:00 to 13:00. Its staff speak Danish, \
German and English. The pharmacy, the grocery and the bicycle workshop are in Strandgade, four \
minutes on foot; the doctor is in the yellow house opposite the church."""

KITCHEN = """\
You plan meals for the canteen of a small school. Every day 140 children and 12 teachers eat \
there. There is one oven with six trays, a steamer, two large pots of 60 litres and no deep \
fryer. Deliveries come on Monday and Thursday before eight. Nine children eat no pork, five no \
meat at all, two cannot have milk, one cannot have nuts, and the kitchen must be free of nuts on \
every day. A meal may cost 2.80 for each child. Soup is served on Wednesdays; fish on Fridays. \
Dessert is fruit, except on birthdays, when there is cake. Leftovers of rice and pasta are kept \
for one day at most. Answer with a dish, the amounts for all, and the time at which the cook has \
to begin; lunch is at 12:15 and the tables are laid by the children of the fourth form. Mention \
each allergen. Write for a cook who has done this for twenty years and dislikes long texts."""

WORKSHOP = """\
You help the mechanics of a bicycle workshop. They repair city bicycles, cargo bicycles and \
electric bicycles of the last fifteen years; racing bicycles are sent to a colleague. The stock \
holds chains for six to twelve gears, brake pads of nine makes, tubes in all usual sizes, spokes \
from 250 to 300 millimetres and bearings, but no frames and no batteries. A repair under an hour \
is done while the customer waits; everything else gets a number and a day. Torque values are \
given in newton metres, the stem with 5, the seat clamp with 6, the crank with 40, the axle nuts \
with 35. Brakes come before gears, gears before lights, lights before looks. Batteries that were \
wet or dropped are not charged but put into the sand box in the yard. Every answer ends with what \
the mechanic has to check before the bicycle leaves the house."""

LIBRARY = """\
You work at the information desk of a town library. The house has three floors: children's books \
and comics on the first, novels, travel and cooking on the second, science, law and the local \
archive on the third. Books are lent for four weeks and films for one; both can be extended \
twice unless somebody waits for them. The annual card costs 18, for pupils and students nothing. \
Late returns cost 20 cents a day and at most the price of the book. The reading room has sixty \
seats, the quiet room twelve, and two rooms for groups can be booked for two hours. Newspapers of \
the last ten years are kept on paper, older ones on microfilm; the reader stands beside the \
stairs on the third floor. On Tuesdays somebody reads to children at three, on Thursdays a \
volunteer helps with letters to offices. Answer in two sentences and name the floor and shelf."""


@dataclass(frozen=True, slots=True)
class Step:
    """One request of the script."""

    what: str
    person: str
    question: str = ""  # empty: the last question again
    long: bool = False  # the answer still streams when the next request arrives
    restart: bool = False  # first kill and start the server of this request


SYSTEM = {"Ada": HARBOUR, "Ben": HARBOUR, "Cid": KITCHEN, "Dee": WORKSHOP, "Eve": LIBRARY}

SCRIPT = (
    Step("Ada's first question", "Ada", "What does it cost to take my car and two children?"),
    Step("Ada's next turn", "Ada", "And when does the last ferry go on a Sunday?"),
    Step("Ben, same system prompt", "Ben", "May my dog come along?"),
    Step(
        "Ada: a long answer",
        "Ada",
        "Write a long letter to a guest who arrives by boat.",
        long=True,
    ),
    Step("Ada, in a second window", "Ada", "Where do I find a doctor?"),
    Step("Ada regenerates the answer", "Ada"),
    Step("Ada, after a server crash", "Ada", "What about my bicycle?", restart=True),
    Step("Cid, another system prompt", "Cid", "What do we cook on Wednesday?"),
    Step("Dee, another system prompt", "Dee", "The brakes squeal. Where do I begin?"),
    Step("Eve, another system prompt", "Eve", "Where are the old newspapers?"),
    Step("Ben comes back", "Ben", "Does he need a ticket?"),
    Step("Ada comes back", "Ada", "Thanks. And the office hours?"),
    Step("Cid comes back", "Cid", "And on Friday?"),
)


REMARKS = (
    "Request 4 still streams when request 5 arrives, so its slot is busy. Before request 7, its "
    "server is killed and started again."
)


@dataclass(slots=True)
class Conversations:
    """The messages of each person so far, as a chat client keeps them."""

    messages: dict[str, list[dict[str, str]]] = field(
        default_factory=lambda: {
            who: [{"role": "system", "content": text}] for who, text in SYSTEM.items()
        }
    )

    def ask(self, step: Step) -> list[dict[str, str]]:
        """Return the messages to send."""
        mine = self.messages[step.person]
        if not step.question:
            return mine[:-1]  # drop the answer that is regenerated
        if step.long:
            # Like a window of its own: the conversation does not keep this question.
            return [*mine, {"role": "user", "content": step.question}]
        mine.append({"role": "user", "content": step.question})
        return list(mine)

    def answered(self, step: Step, text: str) -> None:
        """Add the answer to the conversation, except that of a `long` step."""
        mine = self.messages[step.person]
        if step.long:
            return
        if not step.question:
            mine.pop()
        mine.append({"role": "assistant", "content": text})
