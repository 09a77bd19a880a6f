// A document to try the page with, and questions that it answers.

const TEXT = `# The harbour of Nelby

Nelby is a small town on the west coast. Its harbour was built in 1871 by the engineer Ada Thorne, who had learned her trade at the docks of Bristol. Before that, boats were pulled up the beach by horses.

## The lighthouse

The lighthouse stands on the north pier and is 41 metres high. Its lamp was lit for the first time on the third of May 1874. The first keeper was Joseph Marl, who lived there for thirty years with his sister and a dog called Pepper. Since 1962 the lamp has been electric, and nobody lives in the tower.

## The storm

In the winter of 1903 a storm broke the south pier. Eleven boats were lost, but no sailor died, because the crews had been warned by a telegram from the next town. The pier was repaired within two years, which cost the town 41,300 pounds. Half of that was paid by the fish market.

## Today

Twenty-six fishing boats still use the harbour. The market opens at five in the morning, every day but Sunday. Visitors come for the smoked mackerel and for the regatta in August, when the boats race around Gull Island.
`;

export const SAMPLE = {
  name: "harbour.md",
  text: TEXT,
  beginning: TEXT.split("\n\n")[1], // without the title
};

export const QUESTIONS = [
  "Who built the harbour?",
  "How high is the lighthouse?",
  "Why did no sailor die in the storm?",
];
