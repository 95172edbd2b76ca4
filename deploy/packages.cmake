# Debian packages: cmake --preset package && ninja -C build/package package. One a component; libcuda is nobody's
# dependency, since it is loaded at run time where there is a GPU.
set(at ${PROJECT_SOURCE_DIR}/deploy/debian)
set(made ${PROJECT_BINARY_DIR}/debian)

set(CPACK_GENERATOR DEB)
set(CPACK_PACKAGE_NAME mok)
set(CPACK_PACKAGE_VERSION ${PROJECT_VERSION})
set(CPACK_PACKAGE_CONTACT "MoK developers <developers@mok.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "mixture-of-experts layers as a service of the node")
set(CPACK_DEBIAN_PACKAGE_MAINTAINER ${CPACK_PACKAGE_CONTACT})
set(CPACK_DEBIAN_PACKAGE_RELEASE 1)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_PACKAGE_DIRECTORY ${PROJECT_BINARY_DIR}/packages)
set(CPACK_PACKAGING_INSTALL_PREFIX /usr)
set(CPACK_STRIP_FILES ON)
set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_COMPONENTS_GROUPING IGNORE)
set(CPACK_COMPONENTS_ALL mokd libmok${MOK_ABI} libmok-dev mok-tools)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS ON)
set(CPACK_DEBIAN_PACKAGE_GENERATE_SHLIBS_POLICY ">=")
set(CPACK_DEBIAN_PACKAGE_PRIORITY optional)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
set(CPACK_INSTALL_DEFAULT_DIRECTORY_PERMISSIONS OWNER_READ OWNER_WRITE OWNER_EXECUTE GROUP_READ GROUP_EXECUTE WORLD_READ
    WORLD_EXECUTE)

# mok_package(COMPONENT SECTION TEXT): what dpkg says about it, and the papers that belong to any package.
function(mok_package component section text)
    string(TOUPPER ${component} upper)
    set(CPACK_DEBIAN_${upper}_PACKAGE_NAME ${component} PARENT_SCOPE)
    set(CPACK_DEBIAN_${upper}_PACKAGE_SECTION ${section} PARENT_SCOPE)
    set(CPACK_COMPONENT_${upper}_DESCRIPTION "${text}" PARENT_SCOPE)
    set(doc ${CMAKE_INSTALL_DATADIR}/doc/${component})
    install(FILES ${at}/copyright DESTINATION ${doc} COMPONENT ${component})
    install(FILES ${made}/changelog.Debian.gz ${made}/changelog.gz DESTINATION ${doc} COMPONENT ${component})
endfunction()

mok_package(mokd admin
"mokd owns the devices of a node, and the memory that training jobs keep their
tensors in. Several jobs of several users share the devices; a job or a device
worker that dies costs nobody else anything.

Needs no GPU. With NVIDIA GPUs it uses the driver's libraries where they are.")
mok_package(libmok${MOK_ABI} libs
"What training jobs link to use mokd: sessions, groups, buffers, layers, and
operations that never block a CPU on a GPU.")
mok_package(libmok-dev libdevel
"Headers, pages of the functions, and what pkg-config and CMake need to find
the library that training jobs link to use mokd.")
mok_package(mok-tools utils
"mokctl, which shows what mokd is doing, explains the plan of a layer, and
tells mokd what to do.")

set(exact "(= ${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE})")
set(CPACK_DEBIAN_MOKD_PACKAGE_RECOMMENDS "mok-tools, systemd")
set(CPACK_DEBIAN_MOK-TOOLS_PACKAGE_SUGGESTS "bash-completion")
set(CPACK_DEBIAN_LIBMOK-DEV_PACKAGE_DEPENDS "libmok${MOK_ABI} ${exact}")
set(CPACK_DEBIAN_LIBMOK-DEV_PACKAGE_SHLIBDEPS OFF)

# ------------------------------------------------------------------ what dpkg runs and keeps
set(CPACK_DEBIAN_MOKD_PACKAGE_CONTROL_EXTRA ${at}/conffiles ${at}/postinst ${at}/prerm ${at}/postrm)

# Which version brought a symbol: so far all of them.
file(READ ${PROJECT_SOURCE_DIR}/client/libmok.map map)
string(REGEX REPLACE "#[^\n]*" "" map "${map}")
string(REGEX MATCHALL "MOK_[0-9.]+ {|mok_[a-z0-9_]+" words "${map}")
set(symbols "libmok.so.${MOK_ABI} libmok${MOK_ABI} #MINVER#\n")
foreach(word ${words})
    if(word MATCHES "^(MOK_[0-9.]+) ")
        set(node ${CMAKE_MATCH_1})
        string(APPEND symbols " ${node}@${node} ${PROJECT_VERSION}\n")
    else()
        string(APPEND symbols " ${word}@${node} ${PROJECT_VERSION}\n")
    endif()
endforeach()
file(WRITE ${made}/symbols "${symbols}")
file(WRITE ${made}/triggers "activate-noawait ldconfig\n")
set(CPACK_DEBIAN_LIBMOK${MOK_ABI}_PACKAGE_CONTROL_EXTRA ${made}/symbols ${made}/triggers)

# ------------------------------------------------------------------ papers
file(WRITE ${made}/changelog.Debian "mok (${PROJECT_VERSION}-${CPACK_DEBIAN_PACKAGE_RELEASE}) unstable; urgency=medium

  * See changelog.gz.

 -- ${CPACK_PACKAGE_CONTACT}  Sun, 29 Nov 2026 12:00:00 +0000
")
foreach(paper changelog.Debian changelog)
    set(from ${made}/${paper})
    if(paper STREQUAL changelog)
        set(from ${PROJECT_SOURCE_DIR}/CHANGELOG.md)
    endif()
    execute_process(COMMAND gzip -9nc ${from} OUTPUT_FILE ${made}/${paper}.gz COMMAND_ERROR_IS_FATAL ANY)
endforeach()

include(CPack)
