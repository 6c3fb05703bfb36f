"""Prompt templates: the first words of turns and documents, which the target continues, and tasks about a text.

None is taken from a data set. Fields in braces are filled by ``fillers.py``. No template ends in a space, because the
next token brings its own.
"""

from __future__ import annotations

# First words of users' turns by kind of request; every kind is as frequent as any other.
OPENERS: tuple[tuple[str, ...], ...] = (
    (  # writing
        *("Write a short story about", "Write a poem about", "Write an email to {name} about", "Write a letter to"),
        *(
            "Write a blog post about",
            "Write a review of",
            "Write a song about",
            "Draft a speech on",
            "Write an essay about",
        ),
        *("Write a dialogue between a {word} and a", "Rewrite this sentence:", "Write a slogan for", "Continue:"),
        *("Write a product description for a", "Improve this paragraph:", "Give me ideas for", "Write a scene where"),
    ),
    (  # roleplay
        *("Imagine you are", "Pretend to be a", "You are a {word}", "Act as a", "Play the role of a", "Speak like a"),
        *("You are {name}, a", "Answer as if you were", "Let's play a game:", "I want you to act as a", "Be my"),
        *("You are an expert in", "As a {word} target_model,", "Stay in character:", "Imagine a conversation with"),
    ),
    (  # reasoning
        *("What would happen if", "If all {word}", "Is it true that", "{name} is older than {name}", "Suppose that"),
        *("Which is larger,", "Which of these", "Compare", "Explain the difference between", "Solve this riddle:"),
        *("Explain why", "Why is", "Why do", "Why did the", "What is better,", "{name} sits between {name} and"),
        *("What are the pros and cons of", "Is the following statement true:", "Which word does not belong:"),
    ),
    (  # maths
        *("{name} has {number} {word}", "{name} has {few}", "A train travels {number} miles in", "How many"),
        *(
            "{name} has {few} apples and gives {few} of them to",
            "There are {number} {word}",
            "Each {word} costs ${few}",
        ),
        *("{name} buys {few} {word} for ${few} each and", "A shop sells {number}", "What is {number} plus", "Simplify"),
        *("{name} earns ${few} an hour and works", "{name} reads {few} pages a day. How", "Calculate {number} *"),
        *(
            "Solve for x: {few}x",
            "If {few} workers need {few} days to",
            "{name} and {name} have {number}",
            "What is the",
        ),
        *("A rectangle is {few} meters long and", "What is {few}% of", "In a class of {few} students,", "Find the"),
        *(
            "{name} is {few} years old. {name} is",
            "A farmer has {number} {word} and",
            "It takes {name} {few} minutes to",
        ),
        *("{name} bakes {few} cakes. Each", "Last week {name} drove {number} miles", "Every day, {name} eats {few}"),
        *("{name} had ${number} and spent", "A {word} weighs {number} pounds.", "The sum of two numbers is {number}."),
        *("What is the area of", "A recipe for {few} people needs", "{name} wants to save ${number} for"),
    ),
    (  # code
        *(
            "Write a Python function that",
            "Write a JavaScript function to",
            "Write a C++ program that",
            "Write a SQL query",
        ),
        *("Write a Bash script to", "Write a Java class for", "Write a regular expression", "Write HTML and CSS for"),
        *("Write a Rust function that", "Write unit tests for", "Implement a", "Fix this code:", "Explain this code:"),
        *("What does this error mean:", "How do I sort", "Write a program to", "Given an array of", "Design a class"),
        *("How do I use", "Write a function in Go that", "Convert this code to Python:", "What is the complexity of"),
    ),
    (  # translation
        *("Translate into French:", "Translate this sentence into Spanish:", "Translate into German: The {word}"),
        *("How do you say {word} in", "What does the German word", "In Spanish, what is", "Translate {word} into"),
        *(
            "Translate to English: Die Regierung hat",
            "Translate from German into English: Der Mann",
            "Translate: Ich bin",
        ),
        *("Translate to English: Wir haben in den letzten Jahren", "Translate into English: Le", "Translate: Nach dem"),
        *(
            "Please translate this German text: Es ist",
            "Translate this text to English: Das neue",
            "Translate: Auf der",
        ),
        *("Translate to English: El", "Translate from German: In der Stadt", "Translate to English: Im Jahr {year}"),
        *(
            "What does this mean in English: Sie haben",
            "Translate from German: {name} sagte, dass",
            "Translate: Für die",
        ),
    ),
    (  # summaries, and work on a text that is given
        *(
            "Summarize the",
            "Summarize this article: In {year}, the {word}",
            "Summarize: {Word}",
            "Give me the main points of",
            "Shorten this: The {word}",
        ),
        *(
            "Write a headline for",
            "What is the key idea of",
            "Extract all names from this text: {name} and",
            "Read this: {Word}",
        ),
        *("Given the following", "Based on this text,", "Identify the", "Evaluate the following", "Classify"),
        *(
            "Sort this list:",
            "Summarize this news: The {word}",
            "Put this into a table:",
            "Find the mistakes in this text: The {word}",
        ),
    ),
    (  # facts
        *("Who", "Who was", "Who wrote", "Who invented", "Who is the", "When was", "When did", "Where is", "Where was"),
        *(
            "What is the capital of",
            "What is the name of",
            "Which country",
            "How many people",
            "How old is",
            "What year",
        ),
        *("What is", "What are the", "In which", "How long is", "How far is", "What was", "Which {word}"),
        *(
            "who is the",
            "who played the",
            "when did the",
            "where is the",
            "what is the",
            "how many",
            "what does",
            "when is",
        ),
    ),
    (  # explanations, plans and advice
        *(
            "How do I",
            "How can I",
            "How does",
            "How do",
            "Explain how",
            "Explain to a child why",
            "Explain",
            "Describe",
        ),
        *("Tell me about", "Give me a list of", "Give three examples of", "List the steps to", "I need advice on"),
        *(
            "Can you help me",
            "Create a plan for",
            "I am a {word}",
            "Recommend",
            "What are some",
            "Should I",
            "Teach me about",
        ),
        *(
            "List {few}",
            "I want to",
            "My {word}",
            "What is the best way to",
            "Discuss",
            "Name {few}",
            "Hi, I have a question about",
        ),
    ),
)
# Of a model without a template, whose turns are plain texts.
PLAIN_OPENERS = ("The", "In", "A", "When", "It was", "There is", "How to", "Once", "We", "This", "I", "#", "def", "1.")

# First words of documents: news, encyclopedias, books, manuals.
DOCUMENTS = (
    *("The {word}", "The {word} {word}", "In {year}, the {word}", "{Word} is a", "{Word} is the", "{Word} was a"),
    *("{Word} {word}:", "{Word} and {word}\n\nThe", "# {Word} {word}\n\n", "A {word}", "{Word}, {word} and"),
    *("{name} {Word} was born in {year} in", "{name} {Word} ({year}", "The {Word} of {Word}", "The Battle of {Word}"),
    *("{Word} is a city in", "{Word} is a village in", "{Word} is a genus of", "{Word} is a {year} film", "How {word}"),
    *("In the {word},", "The history of {word}", "The {word} has", "Police in {Word} said", "{Word} officials said"),
    *("By {name} {Word}\n\nThe", "BREAKING: {Word}", "{Word} Wins {Word}", "The price of {word}", "Chapter {few}"),
    *("A new study", "Scientists have", "Once upon a time,", "According to a report", "It was the", "Dear {name},"),
    *("{name} opened the door", "The city of", "The company said on Monday that", "In {year},", "On the morning of"),
    *(
        "The president",
        "The film tells the story of",
        "The team",
        "Introduction\n\nThe",
        "In this chapter,",
        "For years,",
    ),
)
# Long enough to settle the language.
FOREIGN_DOCUMENTS = (
    *(
        "Die Stadt liegt im Süden von Deutschland und",
        "Im Jahr {year} wurde in Berlin die erste",
        "Die Polizei teilte mit,",
    ),
    *("Der {Word} ist ein deutscher", "Es war einmal ein kleines Mädchen, das", "{name} wurde im Jahr {year} in Wien"),
    *(
        "Das Unternehmen hat angekündigt, dass es",
        "Nach Angaben der Regierung sind die",
        "Wir haben in diesem Jahr viele",
    ),
    *(
        "Die meisten Menschen wissen nicht, dass",
        "Am Montag hat der Präsident in Berlin gesagt, dass",
        "Ich bin {few} Jahre",
    ),
    *(
        "La ville de Paris est la plus",
        "En {year}, le gouvernement français a",
        "Il était une fois un petit garçon qui",
    ),
    *("{name} est né en {year} dans la ville de", "Les enfants de l'école ont", "Le {word} est un"),
    *(
        "La ciudad está en el norte de España y",
        "En el año {year}, el gobierno de",
        "Había una vez una niña que vivía en",
    ),
    *("{name} nació en {year} en la ciudad de", "Los estudiantes de la universidad han", "El {word} es un"),
)

FOLLOW_UPS = (
    *("Can you give an example?", "Make it shorter.", "Why is that?", "Explain it in simpler words.", "Go on."),
    *("Rewrite it as a list.", "What are the disadvantages?", "Are you sure?", "Say that again in other words."),
    *("Make it longer.", "Put it into a table.", "Rewrite it as a poem.", "Translate your answer into Spanish."),
    *("Translate that into German.", "Now in French, please.", "Say it in one sentence.", "Summarize your answer."),
    *("Write it as JSON.", "Use bullet points.", "Rewrite it in a formal tone.", "Make it funny.", "Add more details."),
    *("What should I do next?", "What is the next step?", "What happens then?", "How did you get there?"),
    *(
        "Show your work step by step.",
        "Check your answer.",
        "Is there another way?",
        "What if the number were doubled?",
    ),
    *(
        "What if it were half as many?",
        "Now do the same for {number}.",
        "Can you make it faster?",
        "Add comments to it.",
    ),
    *(
        "Write the same in another language.",
        "Give me three more.",
        "Which one is the best, and why?",
        "Who said that?",
    ),
    *(
        "When did that happen?",
        "Where can I learn more?",
        "Tell me more about {word}.",
        "How does that relate to {word}?",
    ),
    *("Rewrite it for a child.", "Rewrite it from the view of {name}.", "Change the ending.", "Give it a title."),
    *(
        "Start every sentence with the same letter.",
        "Leave out all adjectives.",
        "Fix the mistakes.",
        "Thanks! And {word}?",
    ),
    *("Explain the second point.", "What is the opposite?", "Compare it with {word}.", "Write a reply to it."),
)

# Tasks about a text; some with a question about it.
LONG_TASKS = (
    "Summarize the following text.\n\n{text}",
    "Summarize: {text}",
    "{text}\n\nSummarize the text above in a few sentences.",
    "Write a short summary of this article.\n\n{text}",
    "{text}\n\nTL;DR",
    "List the main points of this text:\n\n{text}",
    "Repeat the following text word for word.\n\n{text}",
    "Quote the most important sentences of this text:\n\n{text}",
    "Continue this text:\n\n{text}",
    "Rewrite this text in your own words.\n\n{text}",
    "Give this text a title.\n\n{text}",
    "{text}\n\n{question}",
    "Question: {question}\n\n{text}\n\nAnswer:",
    "Answer with what this text says.\n\n{text}\n\nQuestion: {question}",
    "Here is what I found:\n\n{text}\n\nWith this in mind, answer me: {question}",
    "Use the passages below to answer the question: {question}\n\n{text}",
)
TRANSLATIONS = (
    "Translate the following text into English.\n\n{text}",
    "Translate to English: {text}",
    "{text}\n\nWhat does this mean in English?",
    "Please translate this into English:\n{text}",
    "Give me an English version of this text: {text}",
)
# Questions about a document; some ask for a word that occurs in it.
QUESTIONS = (
    *("What does the text say about {own}?", "What is {own}?", "Who or what is {own}?", "Why is {own} important?"),
    *("How is {own} described?", "When was that?", "Who is mentioned in the text?", "Where does this take place?"),
    *("What is the text above about?", "what happened to {own}", "who is {own}", "Is {own} mentioned, and how?"),
)
