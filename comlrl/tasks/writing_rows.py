"""Sources, stopwords and transition phrases of the writing tasks; written for this package."""

_STOPWORDS = """
a about after all also an and any are as at be because been before being between both but by can could did do
does down during each for from had has have he her here him his how i if in into is it its itself just me more
most my no nor not now of off on once only or other our out over own same she should so some such than that the
their them then there these they this those through to too under until up us very was we were what when where
which while who whom why will with would you your yours
"""
STOPWORDS = frozenset(_STOPWORDS.split())

# Twelve kinds; only phrases that seldom mean anything else.
TRANSITIONS = {
    "elaboration": ["in addition", "furthermore", "moreover", "additionally", "besides", "what is more"],
    "examples": ["for example", "for instance", "such as", "to illustrate", "as an example", "namely"],
    "explanation": ["in other words", "that is to say", "to put it simply", "this means that", "put differently"],
    "cause": ["therefore", "consequently", "as a result", "thus", "hence", "for this reason", "because of this"],
    "contrast": ["however", "on the other hand", "in contrast", "by contrast", "conversely", "on the contrary"],
    "sequence": ["finally", "first of all", "firstly", "secondly", "next", "subsequently", "after that"],
    "emphasis": ["indeed", "in fact", "above all", "notably", "importantly", "most of all", "in particular"],
    "summary": ["in summary", "in short", "overall", "to sum up", "in conclusion", "all in all", "to conclude"],
    "comparison": ["similarly", "likewise", "in the same way", "compared with", "compared to", "equally"],
    "concession": ["although", "even though", "nevertheless", "nonetheless", "despite", "in spite of"],
    "condition": ["unless", "provided that", "as long as", "in case", "otherwise", "on condition that"],
    "time": ["meanwhile", "in the meantime", "at the same time", "afterwards", "eventually", "simultaneously"],
}

_POSTS = """
I share a flat with two friends and we agreed to split the cleaning. For three months I have done the kitchen and
the bathroom alone, since both of them come home late from the hospital. Last week I stopped, and now the sink is
full, nobody talks, and the landlord visits on Friday. I want to keep the friendship, but I also want a schedule
that everybody signs. How do I bring this up without sounding like their mother?

My grandfather left me an old sailing boat in a small harbour near Bergen. The hull is sound, yet the engine has not
run for eleven years, and the marina asks for a yearly fee that I can hardly pay. A neighbour offered to buy the
boat for parts. I have never sailed, although I loved the summers we spent on deck. Should I sell it, find partners
who share the costs, or spend my savings on lessons and repairs?

I teach chemistry at a village school with eleven pupils in my class. This spring two of them built a water filter
from sand, charcoal and a bicycle pump, and a local newspaper wrote about it. Now a company wants to use the design
and offers the school new computers. The parents are divided: some fear the children are being exploited, others
want the computers at once. The head teacher asked me to decide before the holidays.

Six weeks ago I adopted a greyhound that used to race. She is gentle, sleeps on the sofa, and follows me to every
room. But as soon as I leave for work she howls, and the woman upstairs has complained to the building manager. I
tried a radio, a blanket with my smell, and shorter absences. A trainer suggested a second dog, which my lease
forbids. What else can I try before the manager sends a warning?

After nine years as an accountant I was offered a place at a bakery school in Lyon. My partner supports the idea,
but the course costs most of our savings and we planned to buy a house. My boss promised a promotion if I stay. On
weekends I already sell bread at the market and the stall is empty by noon. I wake up thinking about dough, not
about tax returns. Is it foolish to leave a safe career at thirty four?

Our running club meets every Tuesday in the park by the river. A new member is much faster than the rest and leads
the group at a pace that nobody can hold, so beginners have stopped coming. I asked him kindly to slow down; he said
that a club without ambition is only a walk. The other organisers avoid conflict. I could split the club into two
groups, but we have just one trained guide and one first aid kit.

My sister is getting married in a castle two thousand kilometres away and asked me to play the violin during the
ceremony. I have not practised since the accident in which I broke my wrist. She says the guests will not mind a few
wrong notes, while my mother keeps reminding everybody how well I once played. I dread the silence before the first
note. Would it be selfish to suggest a recording or a friend from my old orchestra?

I found a box of letters behind the wardrobe of the house we bought last winter. They were written by a soldier to a
nurse and the last one is still sealed. The former owner died without children, and the museum in town has no room
for private papers. My wife thinks we should open the letter, my son wants to trace the nurse's family on the
internet. I feel like a thief whenever I look at the box.
"""
POSTS = [" ".join(text.split()) for text in _POSTS.split("\n\n")]

_ABSTRACTS = """
Coastal cities plan flood barriers for centuries, yet models of sea level disagree about the speed at which ice
sheets collapse. We present a sampling method that joins tide gauge records with satellite altimetry and
paleoclimate proxies in one hierarchical model. Each source receives an error term that grows with its age, so that
ancient shorelines inform the tails without dominating the mean. Applied to forty harbours, the method narrows
projected ranges by a third and reveals three regions where local subsidence outweighs melting. A sensitivity study
shows that results hold when any single satellite is removed. We discuss how engineers may translate posterior
quantiles into barrier heights, what insurance markets could learn from regional differences, and why monitoring
stations in the southern hemisphere deserve priority. Code, gauges and maps accompany this article.

Swarms of small robots promise cheap exploration of caves, but radio signals fade behind rock and batteries last
minutes. Earlier work relied on fixed relays, which must be carried and abandoned. We introduce a protocol where
robots take turns as temporary relays, chosen by an auction over remaining charge and expected information gain. A
proof bounds the number of messages by the depth of the tunnel graph. In simulation with sixty robots the swarm maps
twice the volume of a baseline with static relays; in a limestone cave, nine prototypes returned without loss.
Failures of single units change coverage by four percent only. The findings suggest that rescue teams could survey
collapsed mines before entering, and that communication should be treated as a movable resource instead of
infrastructure.

Bilingual children switch languages within sentences, a habit long described as confusion by teachers. Recent
corpora allow a statistical view of such switching. We annotate two hundred hours of kitchen conversations from
thirty families and fit a model that predicts switch points from syntax, listener and topic. Listener identity
explains most of the variance, grammar explains when switches are avoided, and vocabulary gaps play a minor role
after age five. The model transfers to an unseen language pair with modest loss. These observations contradict the
picture of confusion and support the idea that switching is a social skill. We release anonymised transcripts
together with annotation guidelines, recommend that school assessments count both languages, and outline an
experiment with puppets that would separate audience from topic.

Optical lattices trap atoms at regular sites and serve as clocks of extreme precision. Collisions between atoms on
the same site shift the frequency and limit accuracy. Reducing density costs signal. We propose to load fermions
into a shallow lattice with tilted wells, where gravity detunes tunnelling and suppresses collisions without
sacrificing atoms. A perturbative treatment yields a magic depth at which the residual shift vanishes to first
order. Measurements on strontium confirm the cancellation over a factor of seven in density and reach an instability
of a few parts in ten to the nineteen. The scheme needs no additional lasers. Portable clocks could adopt it
directly, geodesists may compare heights at the millimetre scale, and searches for drifting constants gain an order
of magnitude in reach.

Urban beekeeping has grown rapidly, while wild pollinators decline nearby. Whether hives harm wild bees remains
disputed because surveys differ in season and method. We followed twelve parks across four years, introducing hives
in half of them by lottery, and counted visits on identical flower plots with cameras. A network classified species
from video; experts checked one frame in fifty. Wild visits fell by a fifth within three hundred metres of hives
during dry summers, but not in wet ones, and recovered once hives were removed. Flower strips compensated for
roughly half of the effect. The experiment indicates that drought mediates competition. City councils might cap hive
numbers in dry years, require planting as a condition for permits, and share camera data openly.

Compilers reorder instructions, and programmers of concurrent software struggle to predict outcomes. Formal memory
models exist, though few developers read them. We describe a tool that translates short programs into litmus tests,
runs them on real processors and explains surprising results by pointing to the pair of operations that moved.
Explanations are extracted from minimal cycles in an event graph, computed by a solver in milliseconds. In a
controlled trial with ninety professionals, participants who used the tool repaired twice as many faults and
introduced fewer fences than those with documentation alone. Performance of the repaired programs improved slightly.
We argue that teaching should begin from observed behaviour, that hardware vendors should publish cycle catalogues,
and that editors could warn about risky patterns while code is being typed.

Medieval manuscripts were often written by several scribes whose hands look alike. Attribution by eye is slow and
contested. We train a network on letter shapes from dated charters, with a loss that ignores ink, parchment and
scanning device. Scribes are then separated by clustering with an unknown number of hands, and uncertainty is
reported for every page. On eleven codices with documentary evidence the method agrees with palaeographers on most
pages and flags two passages where they erred. A monastery long credited with one workshop turns out to have
employed at least five. The approach supports historians in tracing trade between workshops, helps libraries to
describe fragments, and offers a benchmark where ground truth comes from legal records.

Heat pumps could decarbonise homes, but winter peaks threaten to overload distribution grids. Tariffs that vary by
hour shift demand only for attentive customers. We study a controller that preheats rooms by forecasts of weather
and occupancy, subject to comfort limits chosen by residents. The optimisation is convex and runs on a thermostat.
During a winter trial in seventy houses, peaks dropped by a quarter, bills by a tenth, and complaints about
temperature did not increase. Houses with thick walls contributed twice as much as light ones, which suggests
targeting subsidies by thermal mass. Aggregated over a district, the flexibility equals a medium battery. Utilities
may postpone cables, regulators can reward comfort guarantees, and manufacturers should expose simple interfaces for
scheduling.
"""
ABSTRACTS = [" ".join(text.split()) for text in _ABSTRACTS.split("\n\n")]
