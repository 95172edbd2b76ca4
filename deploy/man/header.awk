# One page a group of functions, from mok/mok.h: -v group=WORD (the heading in the header, "" what stands before the
# first), -v page=NAME -v what=SENTENCE -v version= -v date=. With -v list=1: the names of the group's functions.
function flush_text(    i, in_code, line)
{
    for (i = 1; i <= n_doc; i++) {
        line = doc[i]
        if (line ~ /^    /) {
            if (!in_code)
                print ".PP\n.nf"
            in_code = 1
            print code(line)
            continue
        }
        if (in_code)
            print ".fi"
        if (line != "") {
            if (in_code || (i > 1 && doc[i - 1] == ""))
                print ".PP"
            print text(line)
        }
        in_code = 0
    }
    if (in_code)
        print ".fi"
}
function name_of(declaration,    name)
{
    name = declaration
    if (name ~ /^#define/) {
        sub(/^#define +/, "", name)
        sub(/[ (].*/, "", name)
        return name
    }
    if (name ~ /^typedef struct/ || name ~ /^enum/) {
        sub(/^typedef struct /, "", name)
        sub(/^enum /, "", name)
        sub(/[ {;].*/, "", name)
        return name
    }
    if (name ~ /^typedef/) {
        sub(/;.*/, "", name)
        sub(/.* /, "", name)
        return name
    }
    sub(/\(.*/, "", name)
    sub(/.*[ *]/, "", name)
    return name
}
function is_function(declaration) { return declaration ~ /^[a-z].*\(/ && declaration !~ /^(typedef|enum)/ }
function end_declaration(    name)
{
    if (!mine || declaration == "" || declaration ~ /^#(if|e)/) {
        n_doc = 0
        declaration = declaration_lines = ""
        return
    }
    name = name_of(declaration)
    if (list) {
        if (is_function(declaration))
            print name
    } else {
        synopsis = synopsis declaration_lines
        if (n_doc > 0) {
            entry[++n_entry] = name
            for (i = 1; i <= n_doc; i++)
                entry_doc[n_entry, i] = doc[i]
            entry_docs[n_entry] = n_doc
        } else if (follows && is_function(declaration)) {
            entry[n_entry] = entry[n_entry] ", " name # shares the text of the one before
        }
        follows = is_function(declaration)
    }
    n_doc = 0
    declaration = declaration_lines = ""
}
BEGIN { mine = group == ""; skipping = 1 }
/^\/\* -+ / {
    word = $0
    sub(/^\/\* -+ /, "", word)
    sub(/ *\*\/$/, "", word)
    mine = word == group
    next
}
/^ \* @file/ { is_about = 1; next }
/^\/\*\*$/ { n_doc = 0; in_doc = 1; next }
/^\/\*\* .*\*\/$/ {
    n_doc = 1
    doc[1] = $0
    sub(/^\/\*\* /, "", doc[1])
    sub(/ \*\/$/, "", doc[1])
    next
}
/^\/\*\* / { in_doc = 1; n_doc = 1; doc[1] = $0; sub(/^\/\*\* /, "", doc[1]); next }
in_doc && /^ \*\// {
    in_doc = 0
    if (is_about) {
        for (i = 1; i <= n_doc; i++)
            about[i] = doc[i]
        n_about = n_doc
        n_doc = is_about = 0
    }
    next
}
in_doc {
    line = $0
    sub(/^ \*/, "", line)
    last = line ~ /\*\/$/
    sub(/ *\*\/$/, "", line)
    sub(/^ /, "", line)
    doc[++n_doc] = line
    if (last)
        in_doc = 0
    next
}
/^#(ifndef|ifdef|if|else|endif|include|define MOK_MOK_H)/ || /^extern "C"/ || /^}$/ || /^\/\* SPDX/ { next }
/^$/ { follows = 0; if (depth == 0 && declaration == "") n_doc = 0; next }
{
    if (declaration == "")
        declaration = $0
    line = $0
    sub(/\/\*\*< /, "/* ", line)
    declaration_lines = declaration_lines code(line) "\n"
    sub(/\/\*.*/, "", line)
    depth += gsub(/{/, "{", line) - gsub(/}/, "}", line)
    if (depth == 0 && (line ~ /; *$/ || (declaration ~ /^#/ && line !~ /\\$/))) {
        end_declaration()
        if (mine && !list)
            synopsis = synopsis "\n"
    }
}
END {
    if (list)
        exit
    title(page, 3, what)
    print ".SH SYNOPSIS\n.nf"
    print bold("#include <mok/mok.h>") "\n"
    sub(/\n+$/, "", synopsis)
    gsub(/\n\n\n+/, "\n\n", synopsis)
    print synopsis
    print ".fi"
    print ".SH DESCRIPTION"
    if (group == "" && n_about) {
        n_doc = n_about
        for (i = 1; i <= n_doc; i++)
            doc[i] = about[i]
        flush_text()
    }
    for (e = 1; e <= n_entry; e++) {
        print ".SS \"" code(entry[e]) "\""
        n_doc = entry_docs[e]
        for (i = 1; i <= n_doc; i++)
            doc[i] = entry_doc[e, i]
        flush_text()
    }
    print ".SH SEE ALSO"
    count = split(others, other, " ")
    printed = ""
    for (i = 1; i <= count; i++)
        if (other[i] != page)
            printed = printed (printed == "" ? "" : ",\n") "\\fB" code(other[i]) "\\fR(3)"
    print printed ",\n\\fBmok\\-abi\\fR(7), \\fBmokctl\\fR(1), \\fBmokd\\fR(8)"
}
