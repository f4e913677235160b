"""Sentences marked by hand, a paragraph a list: what test_sentences.py measures the splitter with.

PROSE was taken at random from books whose copyright has ended (Forster, Dumas, Sologub, Hume, Buchan, Kipling,
Dickens, Collins, Mary Austin, Cather, Scott) and marked before the rules were tried on it. HARD was written for the
tests, to hold what goes wrong, and the rules were mended by it.
"""

# ruff: noqa: RUF001 - full stops of other scripts

from __future__ import annotations

PROSE = [
    [
        '"Naturally I should have told her.',
        "But in case she should blame you in any way, I promise I will not, I am very willing not to.",
        'I will never speak of it either to her or to any one."',
    ],
    [
        "Her promise brought the long-drawn interview to a sudden close.",
        "Miss Bartlett pecked her smartly on both cheeks, wished her good-night, and sent her to her own room.",
    ],
    [
        "For a moment the original trouble was in the background.",
        "George would seem to have behaved like a cad throughout; perhaps that was the view which one would take "
        "eventually.",
        "At present she neither acquitted nor condemned him; she did not pass judgement.",
        "At the moment when she was about to judge him her cousin's voice had intervened, and, ever since, it was Miss "
        "Bartlett who had dominated; Miss Bartlett who, even now, could be heard sighing into a crack in the partition "
        "wall; Miss Bartlett, who had really been neither pliable nor humble nor inconsistent.",
    ],
    [
        "A secret agitation, akin to shame, stole over them.",
        "Little by little they conquered this feeling during the day.",
        "Alone again, they discussed what they had seen at Trirodov's.",
        "A strange forgetfulness came upon them.",
        "The details of the visit grew more vague the more they tried to recall them.",
        "They found themselves in constant disagreement, and corrected one another.",
        "It might have been a dream.",
        "Now it seemed one, now the other.",
        "Was it reality or a dream?",
        "Where is the borderline?",
        "Whether life be a sweet or a bitter dream, it passes by like a swift vision!",
    ],
    ["Three days passed by.", "Again the day was quiet and clear, again the high Dragon smiled his malignant smile."],
    ['"It might be so under the Bourbons, but at present"--'],
    [
        '"It has always been so, my dear Morrel, since the reign of Louis XIV.',
        "The emperor is more strict in prison discipline than even Louis himself, and the number of prisoners whose "
        'names are not on the register is incalculable."',
        "Had Morrel even any suspicions, so much kindness would have dispelled them.",
    ],
    ['"Well, M. de Villefort, how would you advise me to act?" asked he.'],
    ['"Petition the minister."'],
    [
        '"Oh, I know what that is; the minister receives two hundred petitions every day, and does not read three."',
    ],
    [
        '"With the greatest pleasure.',
        "Dantes was then guilty, and now he is innocent, and it is as much my duty to free him as it was to condemn "
        'him."',
        "Villefort thus forestalled any danger of an inquiry, which, however improbable it might be, if it did take "
        "place would leave him defenceless.",
    ],
    ['"Will you be so good?"'],
    ['"Certainly.', 'But lose no time; we have lost too much already."'],
    ['"That is true.', 'Only think what the poor fellow may even now be suffering."', "Villefort shuddered."],
    [
        "And when We said to the angels: Make obeisance to Adam; they made obeisance.",
        "Nay, you thought that We had not appointed to you a time of the fulfillment of the promise.",
        "And the Book shall be placed, and they will say: Ah! woe to us! what a book is this! it does not omit a small "
        "one nor a great one, but numbers them (all); and what they had done they shall find present (there).",
    ],
    [
        "The case is the same with the transmission of the honours and fortune through a succession of males without "
        "their passing through any female.",
        "It is a quality of human nature, which we shall consider [Part II. Sect, 2.] afterwards, that the imagination "
        "naturally turns to whatever is important and considerable.",
        "It is easy to see, that this property must strengthen the child's relation to the father, and weaken that to "
        "the mother.",
    ],
    [
        "At first I managed to get some pace out of myself, partly from fear and partly from anger.",
        "But I soon found that my body had been tried too far.",
        "I could plod along, but to save my life I could not have hurried.",
        "Any healthy savage could have caught me in a hundred yards.",
    ],
    [
        "Every step was a weariness.",
        "I could hardly drag one foot after the other, and my heart was beating like the fanners of a mill, I had "
        "spasms of acute sickness, and it took all my resolution to keep me from lying down by the roadside.",
    ],
    ["Could I have escaped them?", "I had been in the shadow of the trees for the first part."],
    [
        '"Oh, no," replied Caderousse, "that I can answer for, you did not.',
        'I only wish I could see it now as plainly as I saw it lying all crushed and crumpled in a corner."',
    ],
    [
        "And now I think of it, by Heavens, he may have sent the letter itself!",
        'Fortunately, for me, the handwriting was disguised."',
    ],
    ['"Not I.', 'As I before said, I thought the whole thing was a joke, nothing more."'],
    [
        '"Nonsense!',
        "If any harm come of it, it should fall on the guilty person; and that, you know, is Fernand.",
        "How can we be implicated in any way?",
        "All we have got to do is, to keep our own counsel, and remain perfectly quiet, not breathing a word.",
    ],
    [
        "Here sat the Gods on high--and they were dreams of dreams.",
        "Here were the Hells, hot and cold, and the abodes of tormented ghosts.",
        "Let the chela study the troubles that come from over-eating--bloated stomach and burning bowels.",
    ],
    [
        "To say that he was not startled, or that his blood was not conscious of a terrible sensation to which it had "
        "been a stranger from infancy, would be untrue.",
        "But he put his hand upon the key he had relinquished, turned it sturdily, walked in, and lighted his candle.",
    ],
    [
        "He _did_ pause, with a moment's irresolution, before he shut the door; and he _did_ look cautiously behind it "
        "first, as if he half expected to be terrified with the sight of Marley's pigtail sticking out into the hall.",
        "But there was nothing on the back of the door, except the screws and nuts that held the knocker on, so he "
        'said "Pooh, pooh!" and closed it with a bang.',
    ],
    [
        "The sound resounded through the house like thunder.",
        "Every room above, and every cask in the wine-merchant's cellars below, appeared to have a separate peal of "
        "echoes of its own.",
        "Scrooge was not a man to be frightened by echoes.",
        "He fastened the door.",
    ],
    [
        "That was the point of view I looked at it from.",
        "Economy--with a dash of love.",
        "I put it to my mistress, as in duty bound, just as I had put it to myself.",
    ],
    [
        '"I have been turning Selina Goby over in my mind," I said, "and I think, my lady, it will be cheaper to marry '
        'her than to keep her."',
    ],
    [
        "My lady burst out laughing, and said she didn't know which to be most shocked at--my language or principles.",
        "Some joke tickled her, I suppose, of the sort that you can't take unless you are a person of quality.",
        "Understanding nothing myself but that I was free to put it next to Selina, I went and put it accordingly.",
        "And what did Selina say?",
        "Lord! how little you must know of women, if you ask that.",
        "Of course she said, Yes.",
    ],
    [
        "But they are really not often at home during midday, only the blind and incompetent left to keep the camp.",
        "These are working hours, and all across the mesa one sees the women whisking seeds of chia into their "
        "spoon-shaped baskets, these emptied again into the huge conical carriers.",
    ],
    [
        "Mornings and late afternoons one meets the men singly and afoot on unguessable errands, or riding shaggy, "
        "browbeaten ponies, with game slung across the saddle-bows.",
        "This might be deer or even antelope, rabbits, or, very far south towards Shoshone Land, lizards.",
    ],
    [
        "One morning, two years ago, Cutter went into the hardware store and bought a pistol, saying he was going to "
        "shoot a dog, and adding that he 'thought he would take a shot at an old cat while he was about it.'",
        "(Here the children interrupted Rudolph's narrative by smothered giggles.)",
    ],
    [
        "Cutter went out behind the hardware store, put up a target, practised for an hour or so, and then went home.",
        "At six o'clock that evening, when several men were passing the Cutter house on their way home to supper, they "
        "heard a pistol shot.",
        "They paused and were looking doubtfully at one another, when another shot came crashing through an upstairs "
        "window.",
    ],
    [
        'I may say with Tullius In Catilinam, "Abiit, evasit, erupit, effugit."',
        "He fled, sir, as one may say, incontinent to Stirling.",
        "And now he hath advertised the estate for sale, being himself the last substitute in the entail.",
        "And if I were to lament about sic matters, this would grieve me mair than its passing from my immediate "
        "possession.",
        "But God's will be done, humana perpessi sumus.",
        "Sir John of Bradwardine—Black Sir John, as he is called—who was the common ancestor of our house and the "
        "Inch-Grabbits, little thought such a person would have sprung from his loins.",
    ],
    [
        "It seemed indeed as if the sullen and malignant eye of Front-de-Boeuf possessed some portion of that supposed "
        "power over his unfortunate prisoner.",
        "The Jew sat with his mouth agape, and his eyes fixed on the savage baron with such earnestness of terror, "
        "that his frame seemed literally to shrink together.",
        "The unhappy Isaac was deprived not only of the power of rising to make the obeisance which his terror "
        "dictated, but he could not even doff his cap.",
    ],
]

HARD = [
    ["Dr. Elena Ruiz met Mr. J. P. Hart at 5 p.m. in Room No. 7.", "They spoke for an hour."],
    ["The flat costs $1.5 million, i.e. 3.2 times what it did.", "Nobody bought it."],
    ["She works for Acme Inc. and lives on Elm St. near the park.", "He works for Acme Inc.", "The pay is good."],
    ["He moved to the U.S. in 1999.", "The U.S. Senate met on Jan. 5.", "It was cold in Washington, D.C.", "Was it?"],
    ["See Fig. 3 and pp. 12-15 of vol. 2.", "Smith et al. disagree (cf. Eq. 4)."],
    ["1. Open the box.", "2. Read the manual.", "3. Call us."],
    ["Wait... what did you say?", "I said nothing...", "He shrugged."],
    ['"Stop!" he cried.', '"Why?"', "She did not turn."],
    ["(He had said so before.)", "Nobody listened."],
    ["The result is known.[12]", "It was found in 1931.[3][4]", "Proofs followed."],
    ["Use version 2.0.1 of example.com/tool.py now.", "It is fast!!", "Really?!", "Yes."],
    ["Ph.D. students and M.Sc. students came, e.g. from St. Louis.", "All left at noon."],
    ["It was Plan B.", "Then came another.", "Vitamin C.", "It helps."],
    ["Is it true?—Nobody knows.", "We shall see."],
    ["Fruit, nuts, etc.", "John ate them all.", "Apples, pears, etc. were left."],
    ["At 6 a.m. Eastern time it began.", "It ended at 9 p.m.", "We slept."],
    ["Gen. Lee and Lt. Col. Ames met Sen. Byrd vs. the others.", "No.", "Yes!"],
    ["今天天气很好。", "我们去公园吧！", "“你来吗？”", "他问。"],
    ["彼は「はい。」", "と言った。", "雨が降った。"],
    ["यह एक वाक्य है।", "यह दूसरा है।"],
    ["هل هذا صحيح؟", "نعم."],
    ["Il est parti.", "Où est-il allé ?", "«\u00a0Je ne sais pas.\u00a0»", "Élise rit."],
    ["¿Qué hora es?", "¡Es tarde!", "La Sra. Gómez llegó."],
    ["Das kostet z.B. 5 Euro.", "Er kam am Montag.", "Üben hilft."],
    ["Он ушёл.", "Куда? спросила она.", "Никто не знал."],
    ["Elvis sang for Yahoo! in Ohio.", "Jr. Smith did not."],
    ["He lost to R. A. Dickey.", "A new year began.", "W. E. B. Du Bois wrote it."],
    ["We had read Chapter IV.", "The storm was over."],
    ["Er kam am 3. Oktober an.", "Sie blieb."],
    ["The word . was tokenised .", "The end ."],
    ["“It is I.”", "“Come in, Capt. Grey.”"],
]
