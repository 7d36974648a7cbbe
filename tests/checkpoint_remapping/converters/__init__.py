"""Files in the formats for which timm and transformers have conversion functions, which say what is right."""
