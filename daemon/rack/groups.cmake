# Groups over nodes, without any input or output: for mokd, and for who simulates a rack.
add_library(mok_rack_groups STATIC
    rack/group_agree.c rack/group_home.c rack/group_lead.c rack/group_member.c rack/group_node.c)
target_include_directories(mok_rack_groups PUBLIC ${CMAKE_CURRENT_SOURCE_DIR} ${PROJECT_SOURCE_DIR})
target_link_libraries(mok_rack_groups PUBLIC mok_proto PRIVATE mok_flags)
