# Pages for man from what the sources say already: what the other scripts share.
function text(s)
{
    gsub(/\\/, "\\e", s)
    gsub(/`/, "", s)
    gsub(/'/, "\\(aq", s)
    if (s ~ /^\./)
        s = "\\\\&" s
    return s
}
function code(s)
{
    s = text(s)
    gsub(/-/, "\\-", s)
    return s
}
function bold(s) { return "\\fB" code(s) "\\fR" }
function title(name, section, what)
{
    print ".\\\" Made from the sources; change those."
    printf ".TH \"%s\" \"%s\" \"%s\" \"MoK %s\" \"MoK\"\n", toupper(name), section, date, version
    print ".SH NAME"
    print text(name) " \\- " text(what)
}
