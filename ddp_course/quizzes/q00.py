"""Lesson 00: ranks, what they share, what a collective gives, what happens when one is missing."""

from ..quiz import choice, number


def ranks_add_up(random, ranks=None):
    n = ranks or random.randint(3, 12)
    total = n * (n - 1) // 2
    return {
        "question": f"{n} ranks each bring their own rank number to an `all_reduce` (a sum). "
        "What does rank 1 hold afterwards?",
        "answer": total,
        "why": f"Every rank holds the sum: 0 + 1 + … + {n - 1} = {total}.",
        "mistakes": {
            n * (n + 1) // 2: f"Ranks count from 0: the largest number is {n - 1}, not {n}.",
            1: "1 is what rank 1 brought. `all_reduce` replaces it on every rank.",
            (n - 1) / 2: "That is the mean. `all_reduce` adds up unless you ask for an average.",
        },
    }


QUESTIONS = [
    choice(
        "Four ranks each append a line to the list `notes`, which lives in the notebook. How many "
        "lines does the notebook's list hold afterwards?",
        right="None",
        why="Each rank is a process of its own and appended to its own copy. Only what is sent (a "
        "collective, `report`, a return value) leaves a rank.",
        wrong={
            "Four": "Threads of one process would share the list. Ranks are processes: each "
            "appended to its own copy.",
            "One": "One is what *each rank* saw in its own copy; none of those copies is the "
            "notebook's.",
            "One to four, depending on timing": "There is no race, because nothing is shared: the "
            "notebook's list is never touched.",
        },
    ),
    number(ranks_add_up, original={"ranks": 6}),
    choice(
        "Rank 1 returns without calling the `all_reduce` in which rank 0 waits. Nobody watches "
        "the ranks. What does rank 0 do?",
        right="It waits, by default for half an hour on a CPU",
        why="A collective needs every rank. As long as the other process lives and does not call, "
        "rank 0 waits until the time-out. `launch` watches all ranks and tells you sooner.",
        wrong={
            "It gets its own value back, as the only one who took part": "A collective is among "
            "*all* ranks of the group; it never goes on with those who happen to be there.",
            "It raises an error at once": "There is nothing to notice yet: the other rank could "
            "still be on its way.",
            "It goes on and the result is wrong": "It cannot go on: it needs what rank 1 would "
            "have sent.",
        },
    ),
    choice(
        "Why can PyTorch's `spawn` not run a function that you wrote in a notebook cell?",
        right="The new Python looks for the function in a file, and there is none",
        why="`spawn` sends only the function's name and the module where it should be found. "
        "`launch` sends the function itself.",
        wrong={
            "Notebooks cannot start processes": "They can: `launch` does it in every cell, and "
            "`spawn` started its process too. It was the function that it could not find.",
            "The processes would have to share one GPU": "No GPU is needed, and none was used.",
            "Functions cannot be sent between processes at all": "They can, as code, which is what "
            "`launch` does. `spawn` sends just a name.",
        },
    ),
]
