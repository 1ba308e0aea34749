"""Sixteen chat questions of different kinds and lengths: the quickstart's workload."""

QUESTIONS = (
    "What causes the tides?",
    "Write a haiku about a lighthouse.",
    "Explain photosynthesis to a ten-year-old in three sentences.",
    "List five vegetables that grow well in the shade, with one tip for each.",
    "What is 17 times 23? Show your work.",
    "Translate into French: The train leaves at seven in the morning.",
    "Write a Python function that returns the n-th Fibonacci number.",
    "Why did the Roman Empire fall? Name the causes that historians argue about most, and say "
    "which of them you find the weakest.",
    "Suggest a name for a bakery beside a railway station.",
    "Summarize the plot of Romeo and Juliet in one paragraph.",
    "A farmer has 12 sheep. All but 5 run away, then 2 come back. How many sheep does the farmer "
    "have now, and how do you know?",
    "Give me a recipe for lentil soup with at most six ingredients.",
    "What is the difference between a virus and a bacterium?",
    "Start a mystery story that opens in a library at midnight, while it snows, with a librarian "
    "who hears a page being turned.",
    "How do noise-cancelling headphones work?",
    "Write a polite email that asks for one more week to finish a report. Mention that the data "
    "came late and that a draft of the first two sections is ready to be read.",
)
