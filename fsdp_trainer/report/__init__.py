"""What a person looks at: pictures and pages made from what runs and plans recorded."""
