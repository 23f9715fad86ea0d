//! Table, CSV, JSON, page and pictures tell the same.

use crate::*;

#[test]
fn table_and_csv_are_the_json() {
    let folder = Model::new().write("forms");
    let file = text(&folder, TEXT);
    let report = report(&folder, &file);
    let heads = list(&report, "heads");
    let csv = printed(&folder, &file, &["--csv"]);
    let mut lines = csv.lines();
    let names: Vec<&str> = lines.next().expect("names").split(',').collect();
    let mut rows = 0;
    for (line, head) in lines.zip(heads) {
        let cells: Vec<&str> = line.split(',').collect();
        assert_eq!(cells.len(), names.len());
        for (name, cell) in names.iter().zip(cells).filter(|(name, _)| **name != "labels") {
            let cell: f64 = cell.parse().expect("a number");
            assert!((cell - number(head, name)).abs() < 1e-9, "{name}: {cell}");
        }
        rows += 1;
    }
    assert_eq!(rows, LAYERS * HEADS);
    let table = printed(&folder, &file, &[]);
    assert!(table.starts_with("forms on text.txt: 4 sentences, 28 tokens\n"), "{table}");
    let line = |head: &Value| {
        let numbers: Vec<String> =
            ["entropy", "normalised_entropy"].map(|x| format!("{:.3}", number(head, x))).into();
        format!("{:>5} {:>4}   {}", number(head, "layer"), number(head, "head"), numbers.join("  "))
    };
    for head in heads {
        assert!(table.contains(&line(head)), "{:?} is not in {table}", line(head));
    }
    assert!(table.lines().all(|line| line.len() <= 110), "{table}");
}

#[test]
fn the_page_is_whole_and_needs_no_network() {
    let folder = Model::new().write("a<b>&{{data}} \"page\"");
    let file = text(&folder, TEXT);
    let page = folder.join("page.html");
    let arguments =
        ["--html", page.to_str().expect("a name"), "--layer", "1", "--head", "2", "--sentence", "3"];
    printed(&folder, &file, &arguments);
    let html = fs::read_to_string(&page).expect("the page");
    assert!(html.starts_with("<!doctype html>") && html.ends_with("</html>\n"));
    assert!(
        html.contains("<h1>Heads of a&lt;b&gt;&amp;{{data}} &quot;page&quot;</h1>"),
        "the name is escaped"
    );
    for part in ["src=", "href=", "url(", "@import", "fetch(", "https:"] {
        assert!(!html.contains(part), "{part}");
    }
    // The name of SVG itself is the only address.
    assert_eq!(html.matches("http://www.w3.org/2000/svg").count(), html.matches("http:").count());
    let data = html.split("id=\"data\">").nth(1).and_then(|rest| rest.split("</script>").next());
    let data: Value = serde_json::from_str(data.expect("data")).expect("JSON");
    assert_eq!((number(&data, "layer"), number(&data, "head")), (1.0, 2.0));
    let sentences = list(&data, "sentences");
    let numbers: Vec<f64> = sentences.iter().map(|sentence| number(sentence, "number")).collect();
    assert_eq!(numbers, [3.0, 4.0]); // the chosen one and what is behind it
    let weights = sentences[0]["weights"].as_str().expect("weights");
    assert_eq!(weights.len(), LAYERS * HEADS * 4 * 4);
    let level = |c: char| match c {
        'A'..='Z' => c as usize - 'A' as usize,
        'a'..='z' => c as usize - 'a' as usize + 26,
        '0'..='9' => c as usize - '0' as usize + 52,
        '+' => 62,
        _ => 63,
    };
    let maps = Model::new().rows(IDS[2], &WHOLE).1;
    let want = maps.iter().flatten().flatten().flatten();
    for (got, want) in weights.chars().map(level).zip(want) {
        assert!((got as f64 / 63.0 - want).abs() < 0.5 / 63.0 + 1e-5);
    }
    assert_eq!(html.matches("<tr><td>").count(), LAYERS * HEADS);
    let left: Vec<_> =
        fs::read_dir(&folder).expect("a folder").flatten().map(|entry| entry.file_name()).collect();
    assert!(left.iter().all(|name| !name.to_string_lossy().ends_with(".tmp")), "{left:?}");
}

#[test]
fn pictures() {
    let folder = Model::new().write("pictures");
    let pictures = folder.join("svg/deep");
    printed(&folder, &text(&folder, TEXT), &["--svg", pictures.to_str().expect("a name")]);
    let mut names: Vec<String> = fs::read_dir(&pictures)
        .expect("the directory")
        .flatten()
        .map(|entry| entry.file_name().to_string_lossy().into_owned())
        .collect();
    names.sort();
    let want = [
        "entropy",
        "first",
        "importance",
        "itself",
        "map",
        "next",
        "previous",
        "pruning-cosine",
        "pruning-cost",
        "separators",
        "similarity-0",
        "similarity-1",
    ];
    assert_eq!(names, want.map(|name| format!("{name}.svg")));
    for name in names {
        let svg = fs::read_to_string(pictures.join(&name)).expect("a picture");
        assert!(
            svg.starts_with("<svg xmlns=\"http://www.w3.org/2000/svg\"") && svg.ends_with("</svg>\n"),
            "{name}"
        );
        assert!(!svg.contains("var(") && !svg.contains("NaN"), "{name}: colours and numbers of its own");
        for tag in ["title", "text", "circle", "style"] {
            let opened = svg.matches(&format!("<{tag}>")).count() + svg.matches(&format!("<{tag} ")).count();
            assert_eq!(opened, svg.matches(&format!("</{tag}>")).count(), "{name}: {tag}");
        }
    }
}
