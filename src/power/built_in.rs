//! The profiles that are part of the program, by board; the files lie in `profiles/`.

/// A board's five profiles.
macro_rules! board {
    ($board:literal) => {
        [
            ($board, "balanced", include_str!(concat!("../../profiles/", $board, "/balanced.toml"))),
            ($board, "latency", include_str!(concat!("../../profiles/", $board, "/latency.toml"))),
            ($board, "efficiency", include_str!(concat!("../../profiles/", $board, "/efficiency.toml"))),
            ($board, "silent", include_str!(concat!("../../profiles/", $board, "/silent.toml"))),
            ($board, "battery", include_str!(concat!("../../profiles/", $board, "/battery.toml"))),
        ]
    };
}

/// Board, name, text; boards from large to small, then the one for all others.
pub const BUILT_IN: [[(&str, &str, &str); 5]; 9] = [
    board!("agx-orin-64"),
    board!("agx-orin-32"),
    board!("orin-nx-16-super"),
    board!("orin-nx-16"),
    board!("orin-nx-8"),
    board!("orin-nano-8-super"),
    board!("orin-nano-8"),
    board!("orin-nano-4"),
    board!("any"),
];
